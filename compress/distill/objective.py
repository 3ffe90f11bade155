"""What a student learns from a batch: its teacher's answers, what is inside of the teacher, the text, or all of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.distill import features
from compress.distill.cached_logits import LogitsCache
from compress.distill.divergences import DIVERGENCES, cross_entropy, divergence
from compress.errors import UserError
from compress.recipe.training_stages import DistillationStage
from compress.training.contract import Loss
from compress.training.float_model import ModelTask


@dataclass(frozen=True)
class Objective:
    """How much each loss counts (`compress.recipe.training_stages.LossWeights` says which there are).

    weights      by the loss's name, above 0. Raises ValueError where there is none.
    temperature  of the softmaxes of divergences.
    beta         of jsd.
    """

    weights: Mapping[str, float]
    temperature: float = 1.0
    beta: float = 0.5

    def __post_init__(self) -> None:
        if not self.weights or min(self.weights.values()) <= 0:
            raise ValueError(f"expected losses of weights above 0, found {dict(self.weights)}")

    @staticmethod
    def of(stage: DistillationStage) -> "Objective":
        """What a stage of a recipe says."""
        return Objective(stage.loss.weights(), stage.temperature, stage.beta)

    @property
    def needs_teacher(self) -> bool:
        """Whether there is more to learn than the text."""
        return self.weights.keys() != {"cross_entropy"}

    def divergences(self, student: Tensor, teacher: Tensor) -> dict[str, Tensor]:
        """Those that count, of logits (rows, V)."""
        return {
            kind: divergence(student, teacher, kind, self.beta, self.temperature)
            for kind in DIVERGENCES
            if kind in self.weights
        }

    def total(self, parts: Mapping[str, Tensor]) -> Loss:
        """The weighted sum of losses by their names."""
        value = torch.stack([self.weights[name] * part for name, part in parts.items()]).sum()
        return Loss(value, {name: float(part.detach()) for name, part in parts.items()})


def objective_loss(objective: Objective, student: Any, teacher: Any | LogitsCache | None, batch: Tensor) -> Loss:
    """The weighted loss of transformers models on windows (B, length + 1) int64.

    teacher  a model, or its kept answers: each window then begins with its number. None where the objective does not
             ask for one: ValueError where it does.
    """
    kept = isinstance(teacher, LogitsCache)
    numbers, batch = (batch[:, 0], batch[:, 1:]) if kept else (None, batch)
    inputs, labels = batch[:, :-1], batch[:, 1:]
    given, embedded = _outputs(objective, student, inputs)
    rows = given.logits.flatten(0, 1)
    parts: dict[str, Tensor] = {}
    if isinstance(teacher, LogitsCache):
        assert numbers is not None
        answers = teacher.take(numbers.cpu()).to(rows.device)
        kinds = [kind for kind in DIVERGENCES if kind in objective.weights]
        parts |= {kind: answers.divergence(given.logits, kind, objective.beta) for kind in kinds}
    elif objective.needs_teacher:
        if teacher is None:
            raise ValueError("an objective on more than the text needs a teacher, found none")
        with torch.set_grad_enabled("gradients" in objective.weights):
            wanted, read = _outputs(objective, teacher, inputs)
        parts |= objective.divergences(rows, wanted.logits.flatten(0, 1))
        if "hidden_states" in objective.weights:
            parts["hidden_states"] = features.hidden_distance(given.hidden_states, wanted.hidden_states)
        if "attention" in objective.weights:
            parts["attention"] = features.attention_divergence(given.attentions[-1], wanted.attentions[-1])
        if "relations" in objective.weights:
            parts["relations"] = features.relations(given.hidden_states[-1], wanted.hidden_states[-1])
        if embedded is not None and read is not None:
            ours = features.label_gradient(given.logits, labels, embedded, learn=True)
            theirs = features.label_gradient(wanted.logits, labels, read, learn=False)
            parts["gradients"] = features.relative_distance(ours, theirs)
    if "cross_entropy" in objective.weights:
        parts["cross_entropy"] = cross_entropy(rows, labels.flatten())
    return objective.total(parts)


def _outputs(objective: Objective, model: Any, inputs: Tensor) -> tuple[Any, Tensor | None]:
    """What a model makes of tokens, and the embeddings that it read, where gradients by them count."""
    weights = objective.weights
    inside = {"output_hidden_states": "hidden_states" in weights or "relations" in weights}
    if "attention" in weights:
        inside["output_attentions"] = True
    if "gradients" not in weights:
        return model(input_ids=inputs, use_cache=False, **inside), None
    embedded: Tensor = model.get_input_embeddings()(inputs)
    if not embedded.requires_grad:
        embedded.requires_grad_()
    return model(inputs_embeds=embedded, use_cache=False, **inside), embedded


class DistilledTask(ModelTask):
    """A student that learns an objective (`compress.training.contract.Task`, without the groups).

    teacher  the original, or its kept answers; None where the objective does not ask for it.
    Raises UserError where the two cannot be compared as the objective asks for.
    """

    def __init__(
        self, model: Any, teacher: Any | LogitsCache | None, held_out: Tensor, objective: Objective, autocast: bool
    ):
        super().__init__(model, held_out, autocast)
        self.teacher, self.objective = teacher, objective
        if teacher is not None and not isinstance(teacher, LogitsCache):
            teacher.eval().requires_grad_(False)
            _make_comparable(objective, model, teacher)

    def loss(self, batch: Tensor, progress: float) -> Loss:
        self.model.train()
        return objective_loss(self.objective, self.model, self.teacher, batch)


def _make_comparable(objective: Objective, student: Any, teacher: Any) -> None:
    """Raises UserError for widths that differ where they must not; has attention computed so that it can be read."""
    widths = student.config.hidden_size, teacher.config.hidden_size
    asked = [name for name in ("hidden_states", "gradients") if name in objective.weights]
    if asked and widths[0] != widths[1]:
        raise UserError(
            f"loss.{asked[0]}: expected a model as wide as its teacher ({widths[1]} channels), found {widths[0]}: take "
            "attention or relations, which compare models of any width"
        )
    if {"attention", "gradients"} & objective.weights.keys():
        # The fused kernels keep no attention, and have no second derivative.
        for model in (student, teacher):
            model.set_attn_implementation("eager")
