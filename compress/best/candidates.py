"""Candidates made for real: compressed by the ordinary pipeline, and measured."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.artifact import Artifact
from compress.best.budgets import Budgets
from compress.best.caches import kind_of
from compress.best.forwards import whole_forward
from compress.best.original import text_before
from compress.best.predict import Known, Predicted
from compress.best.space import CACHE, CACHES, KEEP, make_recipe
from compress.context import RunContext
from compress.errors import UserError
from compress.pipeline.inputs import RunInputs
from compress.report.files import read_report
from compress.report.quality import measure
from compress.report.size import weight_bytes as files_bytes
from runtime import load
from runtime.model.layers import weight_bytes

if TYPE_CHECKING:
    from compress.recipe import Recipe
    from compress.report.schema import Comparison, Report
    from runtime.model.load import Model


@dataclass(frozen=True)
class Measured:
    """A candidate's figures: predicted ones before it was made, and measured ones.

    choice      each unit's option, in words; key: its folder.
    disk, memory bytes, weights as they lie in memory with `beside` (keys, values, draft).
    perplexity  its growth (a share) and the upper end of its interval; kl: the mean, nats.
    forward_ms  of a forward by width.
    """

    key: str
    choice: dict[str, str]
    predicted: dict[str, float]
    disk: int
    memory: int
    perplexity: tuple[float, float | None]
    kl: float
    forward_ms: dict[int, float]

    def figure(self, budgets: Budgets) -> float:
        """What the budget of quality counts. Raises UserError where one window was measured: it tells no interval."""
        if budgets.kl is not None:
            return self.kl
        if (upper := self.perplexity[1]) is None:
            raise UserError("--quality: one window of text tells no interval: evaluate more with --eval-tokens")
        return math.log1p(upper)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; `from_dict` reads it."""
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "perplexity": list(self.perplexity),
            "forward_ms": {str(width): spent for width, spent in self.forward_ms.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Measured":
        growth, upper = data["perplexity"]
        forward = {int(width): float(spent) for width, spent in data["forward_ms"].items()}
        return cls(**{**data, "perplexity": (growth, upper), "forward_ms": forward})


@dataclass(frozen=True)
class Measuring:
    """What candidates are measured with: the whole job's inputs (whose recipe is no candidate's), and the original."""

    inputs: RunInputs
    original: "Model"


def make(one: Predicted, known: Known, measuring: Measuring, folder: Path) -> Measured:
    """Compresses a candidate into `folder` (or goes on with it) and measures size, memory, quality and forwards.

    Raises ValueError where the files are not as large as predicted: a mistake of ours.
    """
    inputs, context, cache = measuring.inputs, measuring.inputs.context, one.assignment.get(CACHE, KEEP)
    found: Comparison | None = compressed(one, known, context, folder).quality
    disk = files_bytes(folder / "model")
    if disk != one.disk:
        raise ValueError(f"candidate {one.key}: expected {one.disk} bytes of weights, found {disk}")
    model = load(folder / "model", threads=context.threads)
    decoder: Any = model.decoder
    if not cache.keeps:
        # A report's figures are of a float32 cache.
        found = measure(measuring.original.decoder, decoder, inputs.text.windows, context.seed, kind=kind_of(cache))[0]
    assert found is not None and found.kl_divergence is not None
    perplexity = found.perplexity
    assert perplexity.original and perplexity.compressed
    return Measured(
        one.key,
        {name: str(option) for name, option in one.assignment.items()},
        {
            "disk": float(one.disk),
            "memory": float(one.memory),
            "figure": one.figure,
            "damage": one.damage,
            "tokens_per_second": one.pace.tokens_per_second,
        },
        disk,
        known.beside + known.caches[CACHES.index(cache)] + weight_bytes(decoder.parts),
        (
            perplexity.compressed / perplexity.original - 1,
            None if perplexity.ci95 is None else perplexity.ci95.ratio[1] - 1,
        ),
        found.kl_divergence.mean,
        whole_forward(model, text_before(inputs)),
    )


def compressed(one: Predicted, known: Known, context: RunContext, folder: Path) -> "Report":
    """The report of a candidate's run in `folder`, which is run or gone on with where it is not finished."""
    from compress.pipeline import run

    if not (folder / "report.json").is_file():
        partial = folder.with_name(f"{folder.name}.partial")
        recipe = recipe_of(one, known, context)
        run(replace(measured_briefly(context), recipe=recipe, out=folder, resume=begun(partial)))
    return read_report(Artifact(folder).path)


def measured_briefly(context: RunContext) -> RunContext:
    """Of a run only what decides between candidates: no speed, which is timed in turns, and no choices of lines, which
    take several times as long as KL and perplexity do. The winner's last run has both."""
    return replace(context, speed=False, choices=0)


def recipe_of(one: Predicted, known: Known, context: RunContext) -> "Recipe":
    """The recipe that makes a candidate."""
    return make_recipe(known.units, one.assignment, _about(one), calibration(context))


def begun(partial: Path) -> bool:
    """Whether a run can be gone on with; what was killed before its journal was there is begun anew."""
    from compress.artifact import journal as journals

    return (partial / journals.NAME).is_file()


def calibration(context: RunContext) -> dict[str, Any]:
    """What the recipe has to say of the text, so that it gives the same bytes alone."""
    wished: dict[str, Any] = {"samples": context.samples, "seq_len": context.seq_len}
    return wished | ({} if context.calib is None else {"source": context.calib})


def _about(one: Predicted) -> str:
    counts: dict[str, int] = {}
    cache = one.assignment.get(CACHE, KEEP)
    for name, option in one.assignment.items():
        if name != CACHE:
            counts[str(option)] = counts.get(str(option), 0) + 1
    told = ", ".join(f"{count} × {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    kept = "" if cache.keeps else f"; keys and values: {cache.scheme}"
    return f"Chosen by compress.best, by units of layers: {told}{kept}."
