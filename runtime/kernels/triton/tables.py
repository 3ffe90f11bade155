"""Tile sizes by kind of weight and generation of GPU, and how K is cut.

None of these figures has been measured yet: they are starting points, chosen by what fits registers and what fills the
machine, for `python -m runtime.bench tune` to replace on a GPU. No choice of tiles changes a bit of an integer product;
`splits` does where groups are scaled, so it looks at the scheme and K only.
"""

from dataclasses import dataclass

import torch

# Rows of one tensor-core product: up to here a product has one shape, whatever the width.
NARROW = 16
# Inputs that one split adds before the partial sums are. A constant of the arithmetic, not of a GPU.
INPUTS_PER_SPLIT = 4096


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
    """

    narrow: Tiles
    wide: Tiles
    programs: int


_HOPPER = 264
_AMPERE = 216
# By the least compute capability, newest first.
PLANS: dict[tuple[int, int], dict[str, Plan]] = {
    (9, 0): {
        "integer": Plan(Tiles(64, NARROW, 0, 4, 4), Tiles(128, 64, 0, 4, 3), _HOPPER),
        "float": Plan(Tiles(64, NARROW, 64, 4, 4), Tiles(64, 64, 64, 4, 3), _HOPPER),
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


def plan(kind: str, device: torch.device) -> Plan:
    """The plan of a weight's kind on a device: of the newest generation in the table that is not newer than it."""
    name = "float" if kind == "float" else "integer"
    if device.type != "cuda":
        return INTERPRETER[name]
    found = torch.cuda.get_device_capability(device)
    return next(plans[name] for least, plans in PLANS.items() if found >= least)


def splits(inputs: int) -> int:
    """Parts into which float sums over K inputs are cut, added first to last: a function of K alone."""
    return max(1, -(-inputs // INPUTS_PER_SPLIT))


def rows_at_once(device: torch.device) -> int:
    """Rows that one program rounds: a constant of the device, so that a row's bits know nothing of the others."""
    return 1 if device.type == "cuda" else NARROW
