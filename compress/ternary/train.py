"""What is trained when a model's layers are rounded: by the text, by the original's answers, or both."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.distill.losses import cross_entropy, forward_kl, hidden_mse
from compress.ternary.convert import rounded_layers, set_share
from compress.training.task import Group, Loss

# Windows that are evaluated at once.
_ROWS = 8


@dataclass(frozen=True)
class Objective:
    """How much each loss counts.

    kl             forward KL to the original's next-token distribution, at `temperature`.
    cross_entropy  on the text itself: continued pretraining.
    hidden         squared distance of every block's output from the original's, over the original's mean square.
    """

    kl: float = 1.0
    cross_entropy: float = 0.0
    hidden: float = 0.0
    temperature: float = 1.0

    @property
    def needs_teacher(self) -> bool:
        """Whether the original has to be run beside the student."""
        return self.kl > 0 or self.hidden > 0


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
        teacher   the original; None where the objective does not ask for it.
        held_out  (E, length) int64: windows to evaluate on.
        autocast  whether evaluation, too, computes in bfloat16.

        Raises ValueError for an objective without its teacher, or without any loss.
        """
        if objective.needs_teacher and teacher is None:
            raise ValueError("an objective with kl or hidden states needs the original, found none")
        if not objective.needs_teacher and objective.cross_entropy <= 0:
            raise ValueError("expected at least one loss that counts, found none")
        self.model, self.teacher, self.held_out = model, teacher, held_out
        self.objective, self.manner, self.autocast = objective, manner, autocast
        if teacher is not None:
            teacher.eval().requires_grad_(False)
        if manner.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def groups(self) -> list[Group]:
        """The rounded matrices; and the rest, without weight decay."""
        matrices = [cast("nn.Parameter", layer.weight) for layer in rounded_layers(self.model)]
        known = {id(weight) for weight in matrices}
        rest = [p for p in self.model.parameters() if p.requires_grad and id(p) not in known]
        groups = [Group("rounded", matrices, optimizer=self.manner.optimizer)]
        if rest and self.manner.rest:
            groups.append(Group("rest", rest, self.manner.rest, weight_decay=0.0))
        return groups

    def loss(self, batch: Tensor, progress: float) -> Loss:
        """See `Task.loss`."""
        ramp = self.manner.ramp
        set_share(self.model, min(1.0, progress / ramp) if ramp else 1.0)
        self.model.train()
        inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
        objective, watched = self.objective, self.objective.hidden > 0
        given = self.model(input_ids=inputs, use_cache=False, output_hidden_states=watched)
        rows = given.logits.flatten(0, 1)
        parts: dict[str, Tensor] = {}
        if self.teacher is not None and objective.needs_teacher:
            with torch.no_grad():
                wanted = self.teacher(input_ids=inputs, use_cache=False, output_hidden_states=watched)
            if objective.kl:
                parts["kl"] = forward_kl(rows, wanted.logits.flatten(0, 1), objective.temperature)
            if watched:
                parts["hidden"] = _hidden(given.hidden_states, wanted.hidden_states)
        if objective.cross_entropy:
            parts["cross_entropy"] = cross_entropy(rows, labels)
        total = torch.stack([getattr(objective, name) * value for name, value in parts.items()]).sum()
        return Loss(total, {name: float(value.detach()) for name, value in parts.items()})

    def evaluate(self) -> float:
        """Mean cross entropy of the held-out windows, fully rounded whatever λ training has come to."""
        set_share(self.model, 1.0)
        return held_out_loss(self.model, self.held_out, self.autocast)

    def state(self) -> dict[str, Tensor]:
        """All weights."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state` gave."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state[name])
        set_share(self.model, 1.0)


@torch.no_grad()
def held_out_loss(model: Any, windows: Tensor, autocast: bool = False) -> float:
    """Mean cross entropy in nats of all predicted tokens of windows (E, length) int64."""
    model.eval()
    device = next(model.parameters()).device
    bfloat16 = torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext()
    losses = []
    for rows in windows.split(_ROWS):
        tokens = rows.to(device)
        with bfloat16:
            logits = model(input_ids=tokens, use_cache=False).logits
        found = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")
        losses.append(float(found))
    return math.fsum(losses) / (windows.shape[0] * (windows.shape[1] - 1))


def _hidden(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
    """Mean over blocks; the first state is the embedding, which both share at first."""
    blocks = list(zip(student[1:], teacher[1:], strict=True))
    terms = []
    for mine, wanted in blocks:
        rows = wanted.flatten(0, 1).float()
        terms.append(hidden_mse(mine.flatten(0, 1), rows) / rows.square().mean().clamp(min=1e-12))
    return torch.stack(terms).mean()
