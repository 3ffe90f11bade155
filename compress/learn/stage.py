"""The stage `learn`: what a packed model is made of is trained, once its codes are there, to answer like the original.

1. The packed model is read back, its layers with scales, levels and the codes' places as parameters (`convert`).
2. The training loop lowers the divergence from the original's next-token distribution, over the stage's text.
3. Windows that training does not read choose among all candidates, the codes as they were among them: what is worse
   there is not kept, and the report says so.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.distill.objective import DistilledTask, Objective
from compress.learn.convert import LearnedModel
from compress.learn.layers import LearnedGrid, LearnedTrellis
from compress.logits import kl_rows, log_probabilities
from compress.recipe.training_stages import Learn
from compress.training import float_model
from compress.training.contract import Group, StageContext
from compress.training.data import PackedBatches, portions
from compress.training.loop import train_stage


class LearnTask(DistilledTask):
    """A packed model that learns from its original. Arguments otherwise as `DistilledTask`."""

    def __init__(self, learned: LearnedModel, teacher: Any, held_out: Tensor, stage: Learn, autocast: bool = False):
        super().__init__(learned.model, teacher, held_out, Objective(stage.loss.weights()), autocast)
        self.stage, self.original = stage, teacher
        self.parts: dict[str, tuple[list[nn.Parameter], float]] = {
            "scales": ([layer.gain for layer in learned.layers.values()], 1.0),
            "levels": ([one.shift for one in learned.layers.values() if isinstance(one, LearnedTrellis)], stage.levels),
            "norms": (learned.norms(), stage.norms),
            "codes": (
                [
                    one.place
                    for one in learned.layers.values()
                    if isinstance(one, LearnedGrid) and one.place is not None
                ],
                stage.codes,
            ),
        }
        for parameters, factor in self.parts.values():
            for parameter in parameters:
                parameter.requires_grad_(factor > 0)
        if stage.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def groups(self) -> list[Group]:
        """Scales, levels, norms and the codes' places, each at its share of the rate; nothing decays."""
        return [
            Group(name, parameters, factor, weight_decay=0.0)
            for name, (parameters, factor) in self.parts.items()
            if parameters and factor
        ]

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean KL divergence from the original on the held-out windows, nats, in float32."""
        self.model.eval()
        device, found = next(self.model.parameters()).device, []
        for windows in portions(self.held_out):
            tokens = windows.to(device)
            wanted, given = (model(input_ids=tokens, use_cache=False).logits for model in (self.original, self.model))
            rows = (log_probabilities(logits.flatten(0, 1)) for logits in (wanted, given))
            found.append(float(kl_rows(*rows).double().sum()))
        return math.fsum(found) / self.held_out.numel()

    def state(self) -> dict[str, Tensor]:
        """What is trained; the rest is in the packed directory."""
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(state[name])


def run(stage: Learn, context: StageContext, out: Path) -> dict[str, Any]:
    """Trains the packed model at `context.model` and writes it to `out`, in the same format and bytes.

    Returns, for the report: what the loop says of the run, its losses being KL divergences on the held-out windows;
    `kept`, which candidate is written; `moved`, the share of the codes that changed; `held_out_kl` of both.
    Raises UserError for layers that cannot be trained so, and for whatever stops the loop.
    """
    learned = LearnedModel.load(context.model, context.unpacked or context.original, stage, context.device)
    teacher = float_model.load(context.original, context.device)
    task = LearnTask(learned, teacher, context.held_out, stage, context.settings.autocast)
    batches = PackedBatches(context.tokens, context.settings)
    result = train_stage(context, task, batches, "learn")
    learned.write(out, context.run.shard_bytes)
    kept = "learned" if result.best_step else "plain"
    moved = learned.share_moved()
    context.run.note(verdict(result.before, result.best, kept, moved))
    return {
        **result.to_dict(),
        "kept": kept,
        "moved": moved,
        "held_out_kl": {"plain": result.before, "kept": result.best},
    }


def verdict(before: float, after: float, kept: str, moved: float) -> str:
    """One line for people: what is kept, and why."""
    if kept == "plain":
        return f"learn: nothing came below the plain codes' KL on held-out windows ({before:.5f}): they are kept"
    return (
        f"learn: KL on held-out windows {after:.5f} instead of {before:.5f} "
        f"({100 * (after / before - 1):+.0f} %), {100 * moved:.2f} % of the codes moved"
    )
