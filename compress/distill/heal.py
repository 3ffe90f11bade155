"""The stage heal: the original teaches the pruned model to answer like it again (Minitron, 2407.14679)."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compress.distill.cached_logits import teacher_and_batches
from compress.distill.objective import DistilledTask, Objective
from compress.errors import UserError
from compress.recipe.training_stages import Heal
from compress.training import float_model
from compress.training.contract import StageContext
from compress.training.loop import train_stage


def run(stage: Heal, context: StageContext, out: Path) -> dict[str, Any]:
    """Heals the plain model at `context.model` and writes the plain directory `out`.

    Returns, for the report: what the loop says of the run, `perplexity` of the held-out windows for the original, the
    pruned and the healed model as it is written, and `frozen`, parameters that were not trained (fused experts).
    Raises UserError for whatever stops the loop.
    """
    teacher: Any = float_model.load(context.original, context.device)
    student = float_model.Student.load(context.model, context.device)
    frozen = student.freeze_fused()
    original = float_model.held_out_loss(teacher, context.held_out)
    teacher, batches = teacher_and_batches(stage.answers, teacher, context)
    autocast = context.settings.autocast
    task = HealTask(student.model, teacher, context.held_out, stage, student.block_matrices(), autocast)
    result = train_stage(context, task, batches, "heal")
    student.write(out, context.run.shard_bytes)
    del teacher, student, task
    healed = float_model.held_out_loss(float_model.load(out, context.device), context.held_out)
    found = float_model.perplexities(original=original, pruned=result.before, healed=healed)
    return {**result.to_dict(), "perplexity": found, "frozen": frozen}


class HealTask(DistilledTask):
    """A pruned student; zeros of its blocks' matrices, which pruning has left, stay zeros.

    blocks  the matrices' names.
    Raises UserError as `DistilledTask`, and where muon, which fills zeros in, is to train matrices that have many.
    """

    def __init__(
        self, student: Any, teacher: Any, held_out: Tensor, stage: Heal, blocks: set[str], autocast: bool = False
    ):
        super().__init__(student, teacher, held_out, Objective.of(stage), autocast)
        self.blocks, self.optimizer = blocks, stage.optimizer
        sparse = [name for name, parameter in student.named_parameters() if name in blocks and _keep_zeros(parameter)]
        if sparse and stage.optimizer == "muon":
            raise UserError(f"heal.optimizer: expected adamw where single weights are pruned ({sparse[0]}), found muon")


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
