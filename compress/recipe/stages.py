"""A recipe's stages: the kinds there are, and what goes with what."""

from pydantic import model_validator

from compress.recipe.block_draft import BlockDraft
from compress.recipe.block_stages import MIXABLE, Prune, Quantize, Rotate, Smooth, Strict
from compress.recipe.training import TrainingStage
from compress.recipe.training_stages import Draft, Heal, Learn, Medusa, Qat, Ternary

ORDER = ("prune", "heal", "rotate", "smooth", "quantize", "learn", "ternary", "qat", "draft", "medusa", "block_draft")
# Stages that make the weights of which the artifact consists: one of them at most.
_PACKING = ("quantize", "ternary", "qat")
_ONCE = tuple(kind for kind in ORDER if kind != "prune")


class Stage(Strict):
    """One step: a mapping with one key, the step's kind."""

    prune: Prune | None = None
    heal: Heal | None = None
    rotate: Rotate | None = None
    smooth: Smooth | None = None
    quantize: Quantize | None = None
    learn: Learn | None = None
    ternary: Ternary | None = None
    qat: Qat | None = None
    draft: Draft | None = None
    medusa: Medusa | None = None
    block_draft: BlockDraft | None = None

    @model_validator(mode="after")
    def _one(self) -> "Stage":
        found = sorted(self.model_fields_set)
        if len(found) != 1 or getattr(self, found[0]) is None:
            kinds = ", ".join(ORDER)
            raise ValueError(f"expected a mapping with one of {kinds}, found {' and '.join(found) or 'none'}")
        return self

    @property
    def kind(self) -> str:
        """One of ORDER."""
        return next(iter(self.model_fields_set))

    @property
    def trained(self) -> TrainingStage | None:
        """What the stage says, where it is one that trains."""
        value = getattr(self, self.kind)
        return value if isinstance(value, TrainingStage) else None


def check_order(stages: tuple[Stage, ...]) -> None:
    """Raises ValueError for stages that do not follow each other as ORDER has them, or do not go together."""
    kinds = [stage.kind for stage in stages]
    for kind in _ONCE:
        if kinds.count(kind) > 1:
            raise ValueError(f"expected at most one {kind} stage, found {kinds.count(kind)}")
    packing = [kind for kind in kinds if kind in _PACKING]
    if len(packing) > 1:
        raise ValueError(f"expected one of {', '.join(_PACKING)}, each of which packs the weights, found {packing}")
    if kinds != sorted(kinds, key=ORDER.index):
        raise ValueError(f"expected the order {', '.join(ORDER)}, found {', '.join(kinds)}")
    if "smooth" in kinds and "quantize" not in kinds:
        raise ValueError("expected a quantize stage after smooth, which alone changes nothing, found none")
    if "heal" in kinds and "prune" not in kinds:
        raise ValueError("expected a prune stage before heal, which wins back what pruning costs, found none")
    if "learn" in kinds:
        _check_learned(stages, kinds)
    if "rotate" in kinds and "prune" in kinds:
        raise ValueError("expected no prune beside rotate, which would fill what it has emptied, found both")
    joint = any(stage.medusa is not None and stage.medusa.kind == "medusa-2" for stage in stages)
    other = next((kind for kind in kinds if kind in ("prune", "heal", "rotate", "learn", "ternary", "qat")), None)
    if joint and other:
        raise ValueError(
            f"expected quantize alone before medusa of kind medusa-2, which trains the original and packs it again, "
            f"found {other}"
        )
    methods = [stage.prune.method for stage in stages if stage.prune is not None]
    twice = next((method for method in methods if methods.count(method) > 1), None)
    if twice:
        raise ValueError(f"expected prune with method {twice} at most once, found {methods.count(twice)}")


def _check_learned(stages: tuple[Stage, ...], kinds: list[str]) -> None:
    """Raises ValueError where there is nothing to learn, or what was done before would be undone."""
    quantize = next((stage.quantize for stage in stages if stage.quantize is not None), None)
    if quantize is None:
        raise ValueError("expected a quantize stage before learn, which trains what that has made, found none")
    if quantize.scheme is not None and quantize.scheme not in MIXABLE:
        raise ValueError(f"expected scheme {', '.join(MIXABLE)} before learn, found {quantize.scheme}")
    if quantize.head != "keep":
        raise ValueError(f"expected head keep before learn, which trains the blocks' layers, found {quantize.head}")
    other = next((kind for kind in kinds if kind in ("prune", "smooth")), None)
    if other is not None:
        raise ValueError(f"expected quantize alone before learn, which would undo {other}, found both")
