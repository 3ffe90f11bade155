"""The stages ternary and qat: from a plain model directory to a packed one, by way of training."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.plan import make_plan
from compress.survey import survey
from compress.ternary.convert import Trained, bit_linear, convert, quantized_linear
from compress.ternary.recipe import Qat, Ternary
from compress.ternary.train import RoundedTask, held_out_loss
from compress.training.batches import PackedBatches
from compress.training.loop import train
from runtime.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from compress.model_stages import Given


def run(stage: Ternary | Qat, given: "Given", out: Path) -> dict[str, Any]:
    """Trains the model at `given.model` with its layers rounded and writes the packed directory `out`.

    Returns, for the report: what the loop says of the run; `perplexity` of the held-out windows for the original, for
    the same layers rounded without training, and trained (in float32, on the model as it is packed); `warning`, a
    sentence on the first two; the packed `layers` and what was `left_alone`.
    Raises UserError for layers that cannot be trained so, and for whatever stops the loop.
    """
    from compress.training.parallel import current

    name = "ternary" if isinstance(stage, Ternary) else "qat"
    checkpoint, structure = open_checkpoint(given.model), survey(given.model)
    plan = make_plan({name: checkpoint.shape(name) for name in checkpoint.names()}, structure, stage.quantize())
    original, model = load_plain(given.original), load_plain(given.model)
    before = held_out_loss(original, given.held_out)
    make = bit_linear(stage.weights) if isinstance(stage, Ternary) else quantized_linear(stage.int8_inputs)
    convert(model, plan, checkpoint, make)
    trained = Trained(model, checkpoint, structure, plan)
    trained.freeze_experts()
    rounded = held_out_loss(model, given.held_out)
    objective = stage.losses.objective()
    teacher = original if objective.needs_teacher else None
    del original
    task = RoundedTask(model, teacher, given.held_out, objective, stage.manner(), given.settings.autocast)
    batches = PackedBatches(given.tokens, given.settings, current())
    result = train(task, batches, given.budget, given.settings, given.work, given.progress, given.note, stage=name)
    after = held_out_loss(model, given.held_out)
    records = trained.write(out, given.work / "parts")
    perplexity = {
        "original": math.exp(before),
        "rounded_without_training": math.exp(rounded),
        "trained": math.exp(after),
    }
    return {
        "stage": name,
        **result.to_dict(),
        "perplexity": perplexity,
        "warning": warning(stage, perplexity),
        "layers": [asdict(record) for record in records],
        "left_alone": [asdict(left) for left in plan.left_alone],
    }


def warning(stage: Ternary | Qat, perplexity: dict[str, float]) -> str:
    """What rounding without training would have done to this model, in a sentence for people."""
    weights = stage.weights if isinstance(stage, Ternary) else stage.scheme
    original, rounded, trained = (perplexity[key] for key in ("original", "rounded_without_training", "trained"))
    verb = "RUINS" if rounded > 2 * original else "changes"
    return (
        f"Rounding to {weights} weights without training {verb} this model: perplexity {rounded:.2f} instead of "
        f"{original:.2f} on held-out text. Training has brought it to {trained:.2f}, {trained / original:.2f} times "
        "the original's."
    )


def load_plain(folder: Path) -> Any:
    """A transformers causal language model in float32. Code that comes with a checkpoint is never run."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return model.eval()
