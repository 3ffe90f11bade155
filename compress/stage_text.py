"""The text that stages train on: apart from what calibration and evaluation read, gathered before any work begins."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from compress.recipe import Recipe
from compress.training.task import Progress

if TYPE_CHECKING:
    from calib.training_text import Measured, Stream, TrainingText


@dataclass(frozen=True)
class StageText:
    """One stage's text, not yet tokenised, and (E, length) int64 windows that choose its best weights."""

    text: "TrainingText"
    measured: "Measured"
    length: int
    held_out: Tensor

    def tokens(self, folder: Path, progress: Progress) -> "Stream":
        """The stream, from a file in `folder`, where it is kept for a resumed run."""
        from calib.training_text import tokenize

        place = folder / f"text-{self.text.sha256[:12]}"
        return tokenize(
            self.text,
            self.measured.tokenizer,
            place,
            length=self.length,
            separator=self.measured.separator,
            progress=progress,
        )

    def told(self) -> dict[str, Any]:
        """What the report says of it."""
        about: dict[str, Any] = {"source": self.text.name, "sha256": self.text.sha256}
        about["held_out_tokens"] = self.held_out.numel()
        return about | {"documents": len(self.text.documents), "left_out": dict(self.text.left_out)}


def gather(recipe: Recipe, measured: "Measured") -> dict[int, StageText]:
    """The text of every stage that trains, by its index in the recipe; one source is read once.

    Raises UserError for a source that is not there, and for one that leaves nothing to train on.
    """
    from calib.training_text import gather as read
    from compress.stage_held_out import set_aside

    found: dict[str | None, tuple[TrainingText, Tensor]] = {}
    out = {}
    for index, stage in enumerate(recipe.stages):
        if (trained := stage.trained) is not None:
            source = trained.training.source
            if source not in found:
                found[source] = set_aside(read(source, measured), measured)
            text, held_out = found[source]
            out[index] = StageText(text, measured, trained.training.length, held_out)
    return out
