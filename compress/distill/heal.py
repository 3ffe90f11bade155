"""The stage heal: the original teaches the pruned model to answer like it again (Minitron, 2407.14679)."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compress.distill.cached_logits import LogitsCache, keep
from compress.distill.objective import Objective, objective_loss
from compress.errors import UserError
from compress.recipe.training_stages import Heal
from compress.training import float_model
from compress.training.contract import Batches, Group, Loss
from compress.training.data import PackedBatches
from compress.training.loop import train

if TYPE_CHECKING:
    from compress.training.contract import StageContext


def run(stage: Heal, context: "StageContext", out: Path) -> dict[str, Any]:
    """Heals the plain model at `context.model` and writes the plain directory `out`.

    Returns, for the report: what the loop says of the run, `perplexity` of the held-out windows for the original, the
    pruned and the healed model as it is written, and `frozen`, parameters that were not trained (fused experts).
    Raises UserError for whatever stops the loop.
    """
    teacher, student = (float_model.load(folder, context.device) for folder in (context.original, context.model))
    frozen = float_model.freeze_fused(student, context.model)
    matrices = float_model.block_matrices(student, context.model)
    original = float_model.held_out_loss(teacher, context.held_out)
    packed = PackedBatches(context.tokens, context.settings)
    batches: Batches = packed
    if stage.answers is not None:
        teacher, batches = keep(stage.answers, teacher, packed, context.settings, context.work, context.run.progress)
    task = HealTask(
        student, teacher, context.held_out, stage, {name for name, _ in matrices}, context.settings.autocast
    )
    result = train(
        task,
        batches,
        context.budget,
        context.settings,
        context.work,
        context.run.progress,
        context.run.note,
        stage="heal",
    )
    float_model.write(student, context.model, out, context.run.shard_bytes)
    del teacher, student, task
    healed = float_model.held_out_loss(float_model.load(out, context.device), context.held_out)
    found = float_model.perplexities(original=original, pruned=result.before, healed=healed)
    return {**result.to_dict(), "perplexity": found, "frozen": frozen}


class HealTask:
    """Distillation of a transformers model into a smaller one (`compress.training.contract.Task`).

    teacher   a model, or its kept answers.
    held_out  (E, length) int64: windows to evaluate on.
    blocks    names of the blocks' matrices; their zeros, which pruning has left, stay zeros.
    autocast  whether evaluation, too, computes in bfloat16.

    Raises UserError where muon, which fills zeros in, is to train matrices that have many.
    """

    def __init__(
        self, student: Any, teacher: Any, held_out: Tensor, stage: Heal, blocks: set[str], autocast: bool = False
    ):
        self.student, self.teacher, self.held_out, self.stage = student, teacher, held_out, stage
        self.blocks, self.autocast, self.objective = blocks, autocast, Objective.of(stage)
        if not isinstance(teacher, LogitsCache):
            teacher.eval().requires_grad_(False)
        sparse = [name for name, parameter in student.named_parameters() if name in blocks and _keep_zeros(parameter)]
        if sparse and stage.optimizer == "muon":
            raise UserError(f"heal.optimizer: expected adamw where single weights are pruned ({sparse[0]}), found muon")

    def groups(self) -> list[Group]:
        """The blocks' matrices, the other matrices, and norms and biases, which have no weight decay."""
        return float_model.parameter_groups(self.student, self.blocks, self.stage.optimizer)

    def loss(self, batch: Tensor, progress: float) -> Loss:
        """See `Task.loss`."""
        self.student.train()
        return objective_loss(self.objective, self.student, self.teacher, batch)

    def evaluate(self) -> float:
        """Mean cross entropy of the held-out windows."""
        return float_model.held_out_loss(self.student, self.held_out, self.autocast)

    def state(self) -> dict[str, Tensor]:
        """All weights."""
        return {name: parameter.detach() for name, parameter in self.student.named_parameters()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state` gave."""
        with torch.no_grad():
            for name, parameter in self.student.named_parameters():
                parameter.copy_(state[name])


def _keep_zeros(parameter: nn.Parameter) -> bool:
    """Whether a matrix has zeros, which then get no gradient: with no moments either, AdamW leaves them zeros."""
    kept = parameter.detach() != 0
    if bool(kept.all()):
        return False

    def mask(trained: Tensor) -> None:
        if trained.grad is not None:
            trained.grad.mul_(kept)

    parameter.register_post_accumulate_grad_hook(mask)
    return True
