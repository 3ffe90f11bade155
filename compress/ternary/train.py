"""What is trained when a model's layers are rounded: by the text, by the original's answers, or both."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from compress.distill.logits_cache import LogitsCache
from compress.distill.objective import Objective, objective_loss
from compress.ternary.convert import rounded_layers, set_share
from compress.training import plain_model
from compress.training.task import Group, Loss


@dataclass(frozen=True)
class Manner:
    """How the weights are trained.

    ramp           share of the steps over which λ goes from 0 to 1; 0: layers are rounded from the first step.
    optimizer      of the rounded matrices; everything else has AdamW.
    rest           everything else's rate, as a share of the settings'; 0: it is not trained.
    checkpointing  activations are computed again in the backward pass instead of kept: slower, in less memory.
    """

    ramp: float = 0.0
    optimizer: Literal["adamw", "muon"] = "adamw"
    rest: float = 1.0
    checkpointing: bool = False


class RoundedTask:
    """The task of training a converted model (`compress.training.task.Task`)."""

    def __init__(
        self,
        model: Any,
        teacher: Any | None,
        held_out: Tensor,
        objective: Objective,
        manner: Manner,
        autocast: bool = False,
    ):
        """
        model     a transformers causal language model, converted; float32.
        teacher   the original, or its kept answers; None where the objective does not ask for it.
        held_out  (E, length) int64: windows to evaluate on.
        autocast  whether evaluation, too, computes in bfloat16.
        """
        self.model, self.teacher, self.held_out = model, teacher, held_out
        self.objective, self.manner, self.autocast = objective, manner, autocast
        if teacher is not None and not isinstance(teacher, LogitsCache):
            teacher.eval().requires_grad_(False)
        if manner.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def groups(self) -> list[Group]:
        """The rounded matrices; and the rest, without weight decay."""
        matrices = [cast("nn.Parameter", layer.weight) for layer in rounded_layers(self.model)]
        known = {id(weight) for weight in matrices}
        rest = [p for p in self.model.parameters() if p.requires_grad and id(p) not in known]
        groups = [Group("rounded", matrices, optimizer=self.manner.optimizer)] if matrices else []
        if rest and self.manner.rest:
            groups.append(Group("rest", rest, self.manner.rest, weight_decay=0.0))
        return groups

    def loss(self, batch: Tensor, progress: float) -> Loss:
        """See `Task.loss`."""
        ramp = self.manner.ramp
        set_share(self.model, min(1.0, progress / ramp) if ramp else 1.0)
        self.model.train()
        return objective_loss(self.objective, self.model, self.teacher, batch)

    def evaluate(self) -> float:
        """Mean cross entropy of the held-out windows, fully rounded whatever λ training has come to."""
        set_share(self.model, 1.0)
        return plain_model.held_out_loss(self.model, self.held_out, self.autocast)

    def state(self) -> dict[str, Tensor]:
        """All weights."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state` gave."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state[name])
        set_share(self.model, 1.0)
