"""What is trained when a model's layers are rounded: by the text, by the original's answers, or both."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from compress.distill.cached_logits import teacher_and_batches
from compress.distill.objective import DistilledTask, Objective
from compress.errors import UserError
from compress.model.plan import make_plan
from compress.model.structure import read_structure
from compress.qat.convert import RoundedModel, convert, freeze_experts, rounded_layers, set_share
from compress.qat.layers import BitLinear
from compress.qat.start import fit_layers
from compress.recipe.training_stages import Qat, Ternary
from compress.training import float_model
from compress.training.contract import Group, Loss, StageContext
from compress.training.data import PackedBatches
from compress.training.loop import train_stage
from runtime.checkpoints.open import open_checkpoint


class RoundedTask(DistilledTask):
    """A student whose layers `convert` has replaced; float32. Arguments and errors otherwise as `DistilledTask`."""

    def __init__(self, model: Any, teacher: Any | None, held_out: Tensor, stage: Ternary | Qat, autocast: bool = False):
        super().__init__(model, teacher, held_out, Objective.of(stage), autocast)
        self.stage, self.ramp = stage, stage.ramp if isinstance(stage, Ternary) else 0.0
        if stage.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def groups(self) -> list[Group]:
        """The rounded matrices; gains of their scales; norms and biases; and the rest. Only matrices may decay."""
        stage, layers = self.stage, list(rounded_layers(self.model))
        matrices = [cast("nn.Parameter", layer.weight) for layer in layers]
        gains = [one.gain for one in layers if isinstance(one, BitLinear) and one.gain is not None]
        known = {id(parameter) for parameter in (*matrices, *gains)}
        others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in known]
        groups = [Group("rounded", matrices, optimizer=stage.optimizer)]
        if gains:
            groups.append(Group("scales", gains, cast("Ternary", stage).scales, weight_decay=0.0))
        if stage.norms is None:
            groups.append(Group("rest", others, stage.rest, weight_decay=0.0))
        else:
            vectors, rest = ([p for p in others if (p.dim() < 2) == wanted] for wanted in (True, False))
            groups.append(Group("norms and biases", vectors, stage.norms, weight_decay=0.0))
            groups.append(Group("rest", rest, stage.rest, weight_decay=0.0))
        return [group for group in groups if group.parameters and group.rate_factor]

    def loss(self, batch: Tensor, progress: float) -> Loss:
        set_share(self.model, min(1.0, progress / self.ramp) if self.ramp else 1.0)
        return super().loss(batch, progress)

    def evaluate(self) -> float:
        """Mean cross entropy of the held-out windows, fully rounded whatever λ training has come to."""
        set_share(self.model, 1.0)
        return super().evaluate()

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        set_share(self.model, 1.0)


def run(stage: Ternary | Qat, context: StageContext, out: Path) -> dict[str, Any]:
    """Trains the model at `context.model` with its layers rounded and writes the packed directory `out`.

    Returns, for the report: what the loop says of the run; `perplexity` of the held-out windows for the original, for
    the same layers rounded without training, fitted where the stage does that, and trained (computed in float32, of the
    model as it is written);
    `warning`, two sentences on these; the packed `layers`, what was `left_alone`, and `frozen`, parameters that were
    not trained.
    Raises UserError for layers that cannot be trained so, and for whatever stops the loop.
    """
    kind = "ternary" if isinstance(stage, Ternary) else "qat"
    checkpoint, structure = open_checkpoint(context.model), read_structure(context.model)
    plan = make_plan({name: checkpoint.shape(name) for name in checkpoint.names()}, structure, stage.quantize())
    original, model = (float_model.load(folder, context.device) for folder in (context.original, context.model))
    before = float_model.held_out_loss(original, context.held_out)
    convert(model, plan, checkpoint, stage)
    frozen = freeze_experts(model, structure)
    losses = {"rounded_without_training": float_model.held_out_loss(model, context.held_out)}
    if isinstance(stage, Ternary) and stage.fit_windows:
        fit_to_text(model, stage.fit_windows, context)
        losses["fitted_without_training"] = float_model.held_out_loss(model, context.held_out)
    teacher: Any = original if Objective.of(stage).needs_teacher else None
    del original
    teacher, batches = teacher_and_batches(stage.answers, teacher, context)
    task = RoundedTask(model, teacher, context.held_out, stage, context.settings.autocast)
    result = train_stage(context, task, batches, kind)
    records = RoundedModel(model, checkpoint, structure, plan).write(out, context.run.shard_bytes)
    after = float_model.held_out_loss(model, context.held_out)
    perplexity = float_model.perplexities(original=before, **losses, trained=after)
    return {
        **result.to_dict(),
        "perplexity": perplexity,
        "warning": warning(stage, perplexity),
        "layers": [asdict(record) for record in records],
        "left_alone": [asdict(left) for left in plan.left_alone],
        "frozen": frozen,
    }


def fit_to_text(model: Any, count: int, context: StageContext) -> None:
    """Fits a converted model's layers to the first `count` windows that it will be trained on.

    Raises UserError for more windows than the text has.
    """
    batches = PackedBatches(context.tokens, context.settings)
    if count > batches.windows:
        raise UserError(
            f"fit_windows: expected at most the {batches.windows} windows of the training text, found {count}: ask for "
            "fewer or name a longer text with training.source"
        )
    context.run.note(f"fitting the layers' codes to {count} windows of text …")
    windows = torch.from_numpy(np.stack([batches.window(index)[:-1] for index in range(count)]))
    if unseen := fit_layers(model, windows.to(context.device)):
        context.run.note(
            f"{len(unseen)} layers saw none of that text and start rounded to nearest: {', '.join(unseen)}"
        )


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
