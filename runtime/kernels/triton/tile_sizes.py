"""Tile sizes by kind of weight and generation of GPU, and how K is cut.

Hopper's are the quickest of five to nine in the layers of Llama-3.1-8B's shape on an H200 (docs/gpu.md); the others are
starting points, chosen by what fits registers and shared memory, for `python -m runtime.bench gpu tune` to replace. No
choice of tiles changes a bit; `splits` does where floats are added, so it looks at K alone.
"""

from dataclasses import dataclass, replace

import torch

# Rows of a float product's narrow tiles, and of those of experts, at most.
NARROW = 16
# Rows that a tensor-core product takes at least.
LEAST = 8
# Packed weights go through kernels/triton/product_few.py up to so many rows.
MANY = 64
# Splits of rows of at least so many inputs. Constants of the arithmetic, not of a GPU.
SPLITS, LONG = 4, 1024


@dataclass(frozen=True)
class Tiles:
    """Outputs of one program, its rows (at most, of narrow tiles), inputs of one float product (integer ones have the
    weight's chunk), and how it is launched.

    warps  of wide tiles of packed weights; elsewhere each warp takes a split of K.
    """

    block_n: int
    block_t: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """How one kind of weight runs on one generation: few rows, and more.

    narrow, wide  have one block_k: float sums are cut by it.
    few           narrow tiles of layers with fewer than `least` outputs.
    """

    narrow: Tiles
    wide: Tiles
    few: Tiles | None = None
    least: int = 0


_HOPPER_WIDE = Tiles(128, 64, 0, 8, 3)
_HOPPER_FLOAT = Plan(Tiles(16, NARROW, 64, SPLITS, 4), Tiles(64, 32, 64, SPLITS, 3))
_AMPERE_WIDE, _AMPERE_FLOAT = Tiles(64, 64, 0, 4, 3), Plan(Tiles(16, NARROW, 64, 4, 3), Tiles(32, 32, 64, 4, 2))
# By the least compute capability, newest first, and by kind: where a kind has no plan of its own that of its class.
PLANS: dict[tuple[int, int], dict[str, Plan]] = {
    (9, 0): {
        "integer": Plan(Tiles(32, 32, 0, SPLITS, 3), _HOPPER_WIDE),
        "int8": Plan(Tiles(16, 32, 0, SPLITS, 4), _HOPPER_WIDE),
        "ternary": Plan(Tiles(32, NARROW, 0, SPLITS, 2), _HOPPER_WIDE, few=Tiles(16, NARROW, 0, SPLITS, 3), least=8192),
        "float": _HOPPER_FLOAT,
    },
    (8, 0): {"integer": Plan(Tiles(32, NARROW, 0, SPLITS, 2), _AMPERE_WIDE), "float": _AMPERE_FLOAT},
}
# A program costs the interpreter about as much as its operations do.
INTERPRETER: dict[str, Plan] = {
    "integer": Plan(Tiles(64, NARROW, 0, 1, 1), Tiles(64, 32, 0, 1, 1)),
    "float": Plan(Tiles(64, NARROW, 64, 1, 1), Tiles(64, 32, 64, 1, 1)),
}


def plan(kind: str, device: torch.device, outputs: int | None = None) -> Plan:
    """The plan of a weight's kind on a device: of the newest generation in the table that is not newer than it.

    outputs  of the layer, where the plan may look at them.
    """
    name = _class(kind)
    if device.type != "cuda":
        return INTERPRETER[name]
    capability = torch.cuda.get_device_capability(device)
    plans = next(plans for least, plans in PLANS.items() if capability >= least)
    found = plans.get(kind, plans[name])
    if found.few is None or outputs is None or outputs >= found.least:
        return found
    return replace(found, narrow=found.few)


def for_rows(plan: Plan, rows: int, floats: bool) -> Tiles:
    """The plan's tiles for so many rows of a weight of floats, or of a packed one."""
    if rows > (NARROW if floats else MANY):
        return plan.wide
    most = min(plan.narrow.block_t, NARROW) if floats else plan.narrow.block_t
    return replace(plan.narrow, block_t=max(LEAST, min(most, 1 << (rows - 1).bit_length())))


def splits(inputs: int) -> int:
    """Parts into which K inputs are cut, whose float sums are added first to last: a function of K alone."""
    return SPLITS if inputs >= LONG else 1


def _class(kind: str) -> str:
    return "float" if kind in ("float", "fp8") else "integer"


def rows_at_once(device: torch.device) -> int:
    """Rows that one program rounds: a constant of the device, so that a row's bits know nothing of the others."""
    return 1 if device.type == "cuda" else NARROW
