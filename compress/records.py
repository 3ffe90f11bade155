"""What the pipeline hands to the report besides the run's context: what was done, where it lies. And what all objects
of the report have in common."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from calib.training_text import Measured


class Strict(BaseModel):
    """Frozen, without unknown keys and without NaN. Every key must be there: null is said, not left out."""

    # Fields are written in the order in which a class names them; `class_` and `schema_` without their underscores.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        alias_generator=lambda name: name.rstrip("_"),
        populate_by_name=True,
    )


@dataclass(frozen=True)
class LayerRecord:
    """One quantised layer.

    stored_bytes  all of its tensors but the bias.
    error         ‖W − Ŵ‖ / ‖W‖ (Frobenius), W as the stages before left it.
    output_error  the same of what the layer gives for the calibration text, where a method measures it.
    damping       what was added to the Hessian's diagonal in the end, as a share of its mean; gptq only.
    """

    name: str
    scheme: str
    group_size: int
    weights: int
    stored_bytes: int
    error: float
    output_error: float | None = None
    damping: float | None = None


@dataclass(frozen=True)
class ExpertRecord:
    """One expert of a mixture: the calibration tokens routed to it, and where its statistics come from.

    handled  calibrated: from those tokens; all tokens: they were too few, so from every calibration token; rounded to
             nearest: they were too few, so from none.
    """

    block: int
    expert: int
    tokens: int
    handled: Literal["calibrated", "all tokens", "rounded to nearest"]


@dataclass(frozen=True)
class LeftAlone:
    """A tensor or layer that stayed as it was, and why."""

    layer: str
    why: str


@dataclass(frozen=True)
class RunFacts:
    """A finished artifact before its report. Paths are real directories (`folder` may still be the partial one).

    text     what calibration read, and what the report is to measure on.
    pruned   linear layers, by their names in `model`, of which single weights were set to zero.
    exports  what was made of `model` for other engines: Exported.to_dict() of each.
    """

    model_name: str
    draft_name: str | None
    original: Path
    folder: Path
    model: Path
    draft: Path | None
    layers: tuple[LayerRecord, ...]
    left_alone: tuple[LeftAlone, ...]
    calibration: dict[str, Any]
    text: "Measured"
    versions: dict[str, str] = field(default_factory=dict)
    pruned: tuple[str, ...] = ()
    exports: tuple[dict[str, Any], ...] = ()
