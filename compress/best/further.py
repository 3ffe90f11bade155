"""What a plan leaves to its reader: stages that take longer than a candidate may, and change the winner besides.

Each becomes a recipe beside the plan, with what it takes on this machine, or a sentence why it is none. What it gains
is not predicted: nothing of that kind was measured on this model, and its run's report says it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from compress.errors import USER_ERRORS, UserError
from compress.pipeline.forecast import available, resident, shown
from compress.pipeline.inputs import RunInputs
from compress.pipeline.needs import forecast_recipe
from compress.recipe import Recipe
from compress.recipe.stages import Stage
from compress.recipe.training import Budget
from compress.rotate import stage as rotations
from runtime.formats.schemes import SCHEMES

# Tokens to learn from, with which the built-in learned recipes were measured, and whose stage is taken for what kind of
# codes.
_TOKENS = 500_000
_INTEGERS, _TRELLIS = "int4-learned", "trellis-3-learned"
LEARNED, ROTATED = "learned.yaml", "rotated.yaml"


@dataclass(frozen=True)
class Further:
    """One such recipe. Plain data: the journal keeps it as it is.

    file     of the recipe, in the plan's folder; text: its YAML, "" where there is none, and `why` says why.
    does     what it does, for people.
    seconds  that it takes on this machine beyond the plain recipe's; memory: bytes at the most, the process' own left
             out; disk: bytes that the model grows by.
    """

    file: str
    does: str
    text: str = ""
    why: str = ""
    seconds: float = 0.0
    memory: int = 0
    disk: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Further":
        return cls(**data)


def further(inputs: RunInputs, winner: Recipe) -> Iterator[Further]:
    """What may follow the winner's recipe, of the same model and text."""
    trained = "levels" if _has_tiles(winner) else "roundings"
    yield _tried(inputs, winner, LEARNED, f"trains scales, {trained} and norms to answer like the original", _learned)
    yield _tried(inputs, winner, ROTATED, "rotates the weights before they are rounded", _rotated)


def _tried(inputs: RunInputs, winner: Recipe, file: str, does: str, change: Callable[[Recipe], Recipe]) -> Further:
    """A changed recipe with what it takes, or why there is none."""
    try:
        recipe = change(winner)
        with_stage = forecast_recipe(replace(inputs, context=replace(inputs.context, recipe=recipe)))
        plain = forecast_recipe(replace(inputs, context=replace(inputs.context, recipe=winner)))
    except USER_ERRORS as error:
        return Further(file, does, why=str(error))
    memory = with_stage.memory - resident()
    free = available()
    if free is not None and with_stage.memory > free:
        return Further(file, does, why=f"it takes {shown(memory)} of memory, and {shown(free)} are free")
    seconds = with_stage.seconds + with_stage.training - plain.seconds
    return Further(file, does, recipe.to_yaml(), "", max(seconds, 0.0), memory, _untied_bytes(inputs, recipe))


def _learned(winner: Recipe) -> Recipe:
    """With a stage learn behind, as the built-in recipe for such codes has it, and a budget in tokens."""
    built_in = Recipe.load(_TRELLIS if _has_tiles(winner) else _INTEGERS)
    stage = next(one for one in built_in.with_budget(Budget(tokens=_TOKENS)).stages if one.learn is not None)
    return _changed(winner, LEARNED, (*winner.stages, stage))


def _rotated(winner: Recipe) -> Recipe:
    """With a stage rotate before. Raises UserError for integers, which gain nothing by it."""
    if not _has_tiles(winner):
        raise UserError("integers in groups have gained nothing by it where that was measured (docs/recipes.md)")
    stage = next(one for one in Recipe.load("trellis-3-rotated").stages if one.rotate is not None)
    return _changed(winner, ROTATED, (stage, *winner.stages))


def _changed(winner: Recipe, file: str, stages: tuple[Stage, ...]) -> Recipe:
    """A recipe with other stages, checked. Raises UserError for stages that do not go together."""
    if winner.quantize is None:
        raise UserError("no layer of the plan is packed, so that there is nothing to change")
    name = file.removesuffix(".yaml")
    data = winner.to_dict() | {"name": name, "about": f"the plan's recipe, {name}"}
    data["stages"] = [stage.model_dump(mode="json", exclude_none=True) for stage in stages]
    return Recipe.model_validate(data)


def _has_tiles(recipe: Recipe) -> bool:
    layers = () if recipe.quantize is None else recipe.quantize.layers or ()
    return any(SCHEMES[layer.scheme].codes.has_tiles for layer in layers)


def _untied_bytes(inputs: RunInputs, recipe: Recipe) -> int:
    """Bytes of a head that becomes a table of its own."""
    if recipe.rotate is None:
        return 0
    checkpoint, structure = inputs.target.checkpoint, inputs.structure
    record = rotations.plan(checkpoint, structure, recipe.rotate, inputs.context.seed)
    return int(rotations.report(checkpoint, structure, record).get("untied_bytes", 0))
