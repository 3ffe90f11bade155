"""The map of a plan: which option each unit of each block gets, as a grid with a legend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Fewer bits are warmer; of one width, finer groups are darker.
_COLOURS = {
    "as it is": "#334155",
    "int8": "#1d4ed8",
    "int6 g128": "#3b82f6",
    "int5 g128": "#7dd3fc",
    "int4 g32": "#0f766e",
    "int4 g64": "#14b8a6",
    "int4 g128": "#99f6e4",
    "int3 g32": "#b45309",
    "int3 g64": "#f59e0b",
    "int3 g128": "#fde68a",
    "int2 g32": "#b91c1c",
    "int2 g64": "#f87171",
    "trellis-4": "#2dd4bf",
    "trellis-3": "#fbbf24",
    "trellis-2": "#ef4444",
}
# For options that have no colour of their own, in turns.
_OTHERS = ("#6d28d9", "#a78bfa", "#be185d", "#f9a8d4", "#4d7c0f", "#bef264")
_DARK, _LIGHT = "#0f172a", "#ffffff"


@dataclass(frozen=True)
class Cell:
    """A unit on the map: its bits, its colours, and all of it in words."""

    bits: int
    colour: str
    ink: str
    words: str


@dataclass(frozen=True)
class Entry:
    """A line of the legend: an option, how many units have it, and the share of the weights."""

    option: str
    colour: str
    ink: str
    bits: int
    units: int
    share: float


@dataclass(frozen=True)
class BitMap:
    """Blocks across, units down; None where a block has no such unit."""

    blocks: tuple[int, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    legend: tuple[Entry, ...]


def draw(units: Sequence[Mapping[str, Any]]) -> BitMap:
    """The map of plan.json's units."""
    colours = _colours([unit["option"] for unit in units])
    blocks = tuple(sorted({unit["block"] for unit in units}))
    cells: dict[str, dict[int, Cell]] = {}
    for unit in units:
        name, option = layer(unit), unit["option"]
        words = f"block {unit['block']}, {name}: {option}"
        cells.setdefault(name, {})[unit["block"]] = Cell(unit["bits"], colours[option], _ink(colours[option]), words)
    rows = tuple((name, tuple(row.get(block) for block in blocks)) for name, row in cells.items())
    return BitMap(blocks, rows, _legend(units, colours))


def layer(unit: Mapping[str, Any]) -> str:
    """A unit's name within its block: self_attn.qkv."""
    name = str(unit["name"])
    _, found, after = name.partition(f".{unit['block']}.")
    return after if found else name


def _legend(units: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> tuple[Entry, ...]:
    whole = sum(unit["weights"] for unit in units)
    found = []
    for option, colour in colours.items():
        mine = [unit for unit in units if unit["option"] == option]
        share = sum(unit["weights"] for unit in mine) / whole
        found.append(Entry(option, colour, _ink(colour), mine[0]["bits"], len(mine), share))
    return tuple(sorted(found, key=lambda one: (-one.bits, -one.share)))


def _colours(options: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    others = 0
    for option in dict.fromkeys(options):
        # The last word is the method, which no colour tells.
        what = option if option in _COLOURS else option.rpartition(" ")[0]
        if what in _COLOURS and _COLOURS[what] not in found.values():
            found[option] = _COLOURS[what]
        else:
            found[option] = _OTHERS[others % len(_OTHERS)]
            others += 1
    return found


def _ink(colour: str) -> str:
    """What can be read on a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return _LIGHT if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else _DARK
