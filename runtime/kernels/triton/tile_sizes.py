"""Tile sizes by kind of weight and generation of GPU, and how K is cut.

Hopper's narrow tiles are the quickest of nine (packed weights) and four (floats) in steps of Llama-3.1-8B's shape on
an H200 (docs/gpu.md); the others are starting points, chosen by what fits registers and what fills the machine, for
`python -m runtime.bench gpu tune` to replace. No choice of tiles changes a bit of an integer product; `splits` does
where groups are scaled, so it looks at the scheme and K only.
"""

from dataclasses import dataclass, replace

import torch

# Up to so many rows a float product has one shape, whatever the width.
NARROW = 16
# Rows that a tensor-core product takes at least. Packed weights, whose bits no shape changes, spare what they can.
LEAST = 8
# Bytes of one asynchronous load at least, and threads of a warp: tiles with less for each thread are waited for.
_LOAD, _WARP = 4, 32
# Inputs that one split adds before the partial sums are. Constants of the arithmetic, not of a GPU. Float tiles stay
# large on small layers (a smaller one would be another instruction), so their K is cut sooner.
INPUTS_PER_SPLIT = {"integer": 4096, "float": 1024}


@dataclass(frozen=True)
class Tiles:
    """Outputs and rows of one program, inputs of one float product (integer ones have the weight's chunk), launch."""

    block_n: int
    block_t: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """How one kind of weight runs on one generation: up to `NARROW` rows, and more.

    narrow, wide  have one block_k: it says where a float product is split.
    programs      what a narrow product is cut into at least, where K allows: about two for each multiprocessor.
    few           narrow tiles of layers with so few outputs that `narrow` would leave multiprocessors idle.
    """

    narrow: Tiles
    wide: Tiles
    programs: int
    few: Tiles | None = None


_HOPPER = 264
_AMPERE = 216
_HOPPER_WIDE = Tiles(128, 64, 0, 8, 3)
# By the least compute capability, newest first, and by kind: where a kind has no plan of its own that of its class.
PLANS: dict[tuple[int, int], dict[str, Plan]] = {
    (9, 0): {
        "integer": Plan(Tiles(64, NARROW, 0, 4, 4), _HOPPER_WIDE, _HOPPER, few=Tiles(32, NARROW, 0, 4, 4)),
        **dict.fromkeys(
            ("int8", "nf4", "ternary"),
            Plan(Tiles(64, NARROW, 0, 4, 6), _HOPPER_WIDE, _HOPPER, few=Tiles(16, NARROW, 0, 1, 8)),
        ),
        "float": Plan(Tiles(64, NARROW, 128, 4, 4), Tiles(64, 64, 128, 4, 2), _HOPPER),
    },
    (8, 0): {
        "integer": Plan(Tiles(32, NARROW, 0, 4, 4), Tiles(64, 64, 0, 4, 3), _AMPERE),
        "float": Plan(Tiles(32, NARROW, 64, 4, 4), Tiles(64, 64, 64, 4, 2), _AMPERE),
    },
}
# A program costs the interpreter about as much as its operations do.
INTERPRETER: dict[str, Plan] = {
    "integer": Plan(Tiles(64, NARROW, 0, 1, 1), Tiles(64, 32, 0, 1, 1), 2),
    "float": Plan(Tiles(64, NARROW, 64, 1, 1), Tiles(64, 32, 64, 1, 1), 2),
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
    if found.few is None or outputs is None or 2 * outputs >= found.programs * found.narrow.block_n:
        return found
    return replace(found, narrow=found.few)


def for_rows(plan: Plan, rows: int, chunk: int) -> Tiles:
    """The plan's tiles for so many rows; `chunk` inputs are one product of a packed weight (0: a float weight)."""
    if rows > NARROW:
        return plan.wide
    if rows <= LEAST and chunk * LEAST >= plan.narrow.warps * _WARP * _LOAD:
        return replace(plan.narrow, block_t=LEAST)
    return plan.narrow


def splits(kind: str, inputs: int) -> int:
    """Parts into which float sums over K inputs are cut, added first to last: a function of the kind and K alone."""
    return max(1, -(-inputs // INPUTS_PER_SPLIT[_class(kind)]))


def _class(kind: str) -> str:
    return "float" if kind in ("float", "fp8") else "integer"


def rows_at_once(device: torch.device) -> int:
    """Rows that one program rounds: a constant of the device, so that a row's bits know nothing of the others."""
    return 1 if device.type == "cuda" else NARROW
