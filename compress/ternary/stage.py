"""The stages ternary and qat: from a plain model directory to a packed one, by way of training."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.distill.kept_answers import keep
from compress.plan import make_plan
from compress.survey import survey
from compress.ternary.convert import RoundedModel, bit_linear, convert, freeze_experts, quantized_linear
from compress.ternary.recipe import Qat, Ternary
from compress.ternary.train import RoundedTask
from compress.training import plain_model
from compress.training.batches import PackedBatches
from compress.training.loop import train
from compress.training.task import Batches
from runtime.checkpoints.open import open_checkpoint

if TYPE_CHECKING:
    from compress.model_stages import Given


def run(stage: Ternary | Qat, given: "Given", out: Path) -> dict[str, Any]:
    """Trains the model at `given.model` with its layers rounded and writes the packed directory `out`.

    Returns, for the report: what the loop says of the run; `perplexity` of the held-out windows for the original, for
    the same layers rounded without training, and trained (computed in float32, of the model as it is written);
    `warning`, two sentences on these; the packed `layers`, what was `left_alone`, and `frozen`, parameters that were
    not trained.
    Raises UserError for layers that cannot be trained so, and for whatever stops the loop.
    """
    kind = "ternary" if isinstance(stage, Ternary) else "qat"
    checkpoint, structure = open_checkpoint(given.model), survey(given.model)
    plan = make_plan({name: checkpoint.shape(name) for name in checkpoint.names()}, structure, stage.quantize())
    original, model = (plain_model.load(folder, given.device) for folder in (given.original, given.model))
    before = plain_model.held_out_loss(original, given.held_out)
    make = bit_linear(stage.weights) if isinstance(stage, Ternary) else quantized_linear(stage.int8_inputs)
    convert(model, plan, checkpoint, make)
    frozen = freeze_experts(model, structure)
    rounded = plain_model.held_out_loss(model, given.held_out)
    objective = stage.objective()
    teacher: Any = original if objective.needs_teacher else None
    del original
    packed = PackedBatches(given.tokens, given.settings)
    batches: Batches = packed
    if stage.answers is not None:
        teacher, batches = keep(stage.answers, teacher, packed, given.settings, given.work, given.progress)
    task = RoundedTask(model, teacher, given.held_out, objective, stage.manner(), given.settings.autocast)
    result = train(task, batches, given.budget, given.settings, given.work, given.progress, given.note, stage=kind)
    written = RoundedModel(model, checkpoint, structure, plan)
    records = written.write(out, given.work / "parts", given.shard_bytes)
    after = plain_model.held_out_loss(model, given.held_out)
    perplexity = plain_model.perplexities(original=before, rounded_without_training=rounded, trained=after)
    return {
        **result.to_dict(),
        "perplexity": perplexity,
        "warning": warning(stage, perplexity),
        "layers": [asdict(record) for record in records],
        "left_alone": [asdict(left) for left in plan.left_alone],
        "frozen": frozen,
    }


def warning(stage: Ternary | Qat, perplexity: dict[str, float]) -> str:
    """What rounding without training would have done to this model, in two sentences for people."""
    weights = stage.weights if isinstance(stage, Ternary) else stage.scheme
    original, rounded, trained = (perplexity[key] for key in ("original", "rounded_without_training", "trained"))
    verb = "RUINS" if rounded > 2 * original else "changes"
    return (
        f"Rounding to {weights} weights without training {verb} this model: perplexity {rounded:.2f} instead of "
        f"{original:.2f} on held-out text. Training has brought it to {trained:.2f}, {trained / original:.2f} times "
        "the original's."
    )
