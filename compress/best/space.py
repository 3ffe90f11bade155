"""What the planner chooses from: a model's fused units, what each may become, and the recipe that a choice is."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compress.errors import UserError
from compress.model.plan import make_plan
from compress.model.structure import ModelStructure
from compress.recipe import Recipe
from compress.recipe.block_stages import Quantize
from compress.stages.sensitivity import fused_units
from runtime.formats.schemes import GRIDS, SCHEMES, CodeKind, Scheme


@dataclass(frozen=True)
class Option:
    """What a unit may become. `scheme` "keep": it stays as it is; `group_size` 0: one scale per output row."""

    scheme: str
    group_size: int = 0
    method: str = "rtn"

    @property
    def keeps(self) -> bool:
        return self.scheme == "keep"

    @property
    def bits(self) -> int:
        """Of a code; 16 where the unit stays."""
        return 16 if self.keeps else SCHEMES[self.scheme].bits

    @property
    def library(self) -> str:
        """Whose files hold it: one model has those of one. Raises KeyError for a unit that stays, which all hold."""
        return SCHEMES[self.scheme].codes.library

    @property
    def has_tiles(self) -> bool:
        """Whether it is a trellis."""
        return not self.keeps and SCHEMES[self.scheme].codes.has_tiles

    @property
    def stored_as(self) -> Scheme:
        """How files hold it. Raises KeyError for a unit that stays."""
        return SCHEMES[self.scheme].scheme(self.group_size)

    def __str__(self) -> str:
        group = f" g{self.group_size}" if self.group_size else ""
        return "as it is" if self.keeps else f"{self.scheme.removesuffix('-dynamic')}{group} {self.method}"


KEEP, INT8 = Option("keep"), Option("int8-dynamic")
OPTIONS = (
    KEEP,
    INT8,
    *(Option(scheme, 128, "gptq") for scheme in ("int6", "int5")),
    *(Option(scheme, group, "gptq") for scheme in ("int4", "int3") for group in (128, 64, 32)),
    *(Option("int2", group, "gptq") for group in (64, 32)),
    *(Option(f"trellis-{bits}", method="gptq") for bits in (4, 3, 2)),
)
# What keys and values may be held as: float32, or rounded with factors that the run calibrates.
CACHES = (KEEP, Option("int8", method="cache"), Option("int4", method="cache"))
# What was left out of the search, and why: every plan says it.
NOT_TRIED = (
    (
        "nf4, ternary, ternary-1.25, fp8",
        "files of another format, or for GPUs: one model holds one format (try a built-in recipe)",
    ),
    ("a quantised cache beside layers with a state", "its factors are measured where every layer attends"),
    ("a trellis beside integers", "one model holds one format: each was searched by itself"),
    ("int6 to int2 rounded to nearest", "the bytes and the speed of gptq's codes, which are fitted to text"),
    ("int2 in groups of 128", "two bits want small groups"),
    ("awq, hqq, zero points, smoothing", "no per-layer stage of a recipe does them yet"),
    ("the embedding and the output head", "no per-layer stage of a recipe takes them: they stay as they are"),
    ("a draft of fewer bits, trained drafts, heads, pruning", "the draft is taken as it is, and nothing is trained"),
    (
        "rotated keys and values",
        "the planner's caches are those without a basis (recipes kv-int4-rotated, kv-int3-rotated)",
    ),
)


@dataclass(frozen=True)
class Unit:
    """Linear layers that engines compute together, and so have one scheme.

    layers   transformers' names; prefixes: the checkpoint's.
    shapes   (outputs N, inputs K) of each.
    block    the number of their block.
    options  what they may become: those whose groups divide every row.
    """

    name: str
    layers: tuple[str, ...]
    prefixes: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    block: int
    options: tuple[Option, ...]

    @property
    def weights(self) -> int:
        return sum(n * k for n, k in self.shapes)


Assignment = Mapping[str, Option]
"""What each unit becomes, by its name; and by the name CACHE what keys and values do (KEEP where it is absent)."""
CACHE = "keys and values"


def by_library(units: Sequence[Unit]) -> list[tuple[Unit, ...]]:
    """The units with the options of each library alone, which fit into one model."""
    libraries = dict.fromkeys(one.library for unit in units for one in unit.options if not one.keeps)
    return [tuple(replace(unit, options=_held_by(unit, library)) for unit in units) for library in libraries]


def _held_by(unit: Unit, library: str) -> tuple[Option, ...]:
    return tuple(one for one in unit.options if one.keeps or one.library == library)


def library_of(assignment: Assignment) -> str | None:
    """Whose files the model is; None where no unit changes."""
    options = (option for name, option in assignment.items() if name != CACHE and not option.keeps)
    return next((option.library for option in options), None)


def find_units(
    shapes: Mapping[str, tuple[int, ...]], model: ModelStructure, options: Sequence[Option] = OPTIONS
) -> tuple[Unit, ...]:
    """The units of a checkpoint (`shapes`, by tensor name) in the order of its blocks.

    Raises UserError for a model with experts, or none of whose layers can be int8.
    """
    plan = make_plan(shapes, model, Quantize(scheme="int8-dynamic"))
    layers = {layer.module: layer for layer in plan.layers.values()}
    held = {codes: _held_as(scheme, shapes, model) for codes, scheme in _examples(options).items()}
    if any(".experts." in name for name in layers):
        raise UserError("compress.best does not take experts apart yet: use a built-in recipe for this model")
    found = []
    for name, modules in fused_units(layers).items():
        sizes = tuple((shapes[layers[m].tensor][0], shapes[layers[m].tensor][1]) for m in modules)
        number = model.block(layers[modules[0]].tensor)
        assert number is not None
        fitting = tuple(
            one
            for one in options
            if one.keeps
            or (
                held[SCHEMES[one.scheme].codes].issuperset(modules)
                and all(k % (one.group_size or 1) == 0 for _, k in sizes)
            )
        )
        found.append(Unit(name, modules, tuple(layers[m].prefix for m in modules), sizes, number, fitting))
    return tuple(sorted(found, key=lambda unit: unit.block))


def _examples(options: Sequence[Option]) -> dict[CodeKind, str]:
    """One scheme of each kind of codes."""
    return {SCHEMES[one.scheme].codes: one.scheme for one in reversed(options) if not one.keeps}


def _held_as(scheme: str, shapes: Mapping[str, tuple[int, ...]], model: ModelStructure) -> set[str]:
    """The layers that codes of a scheme can hold: some models ask for plain weights, or for whole tiles."""
    try:
        plan = make_plan(shapes, model, Quantize(scheme=scheme))
    except UserError:
        return set()  # there is no layer that they can hold
    return {layer.module for layer in plan.layers.values()}


def make_recipe(units: Sequence[Unit], assignment: Assignment, about: str, calibration: Mapping[str, Any]) -> Recipe:
    """The recipe that gives this assignment: one stage, whose layers are named by regular expressions.

    Raises UserError where every unit stays as it is: there is nothing to do.
    """
    chosen: dict[Option, list[Unit]] = {}
    for unit in units:
        if not (option := assignment[unit.name]).keeps:
            chosen.setdefault(option, []).append(unit)
    cache = assignment.get(CACHE, KEEP)
    if not chosen and cache.keeps:
        raise UserError(
            "within these budgets the model is best as it is: nothing is to be compressed; give a smaller --disk or "
            "--memory, or a larger --quality"
        )
    layers = []
    for option in sorted(chosen, key=lambda one: (-one.bits, -one.group_size, one.method)):
        entry: dict[str, Any] = {"scheme": option.scheme, "method": option.method}
        if option.group_size:
            entry["group_size"] = option.group_size
        if option.scheme in GRIDS and option.method == "gptq":
            entry["act_order"] = True  # no byte more, and a little less damage
        layers.append(entry | {"targets": _patterns([name for unit in chosen[option] for name in unit.layers])})
    stages = [{"quantize": {"method": "per-layer", "layers": layers}}] if layers else []
    wished: dict[str, Any] = {} if cache.keeps else {"kv": {"scheme": cache.scheme}}
    wished |= {"calibration": dict(calibration)} if calibration else {}
    return Recipe.model_validate({"name": "best", "about": about, "stages": stages, **wished})


def _patterns(names: Sequence[str]) -> list[str]:
    """Regular expressions that match these names and no others: one for each name without its block's number."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for name in names:
        before, number, after = re.split(r"\.(\d+)\.", name, maxsplit=1)
        numbers.setdefault((before, after), []).append(number)
    return [
        rf"^{re.escape(before)}\.({'|'.join(found)})\.{re.escape(after)}$" for (before, after), found in numbers.items()
    ]
