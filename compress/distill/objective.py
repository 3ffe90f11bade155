"""What a student learns from a batch: its teacher's answers, its hidden states, the text itself, or some of each."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.distill.cached_logits import LogitsCache
from compress.distill.losses import cross_entropy, forward_kl, hidden_mse
from compress.training.contract import Loss

if TYPE_CHECKING:
    from compress.recipe.training_stages import Heal, Rounded


@dataclass(frozen=True)
class Objective:
    """How much each loss counts.

    kl             forward KL to the teacher's next-token distribution, at `temperature`.
    cross_entropy  on the text itself: continued pretraining.
    hidden         squared distance to the teacher's hidden states over their mean square: after every block, or after
                   the last one where the two have different numbers of blocks.

    Raises ValueError where none counts.
    """

    kl: float = 1.0
    cross_entropy: float = 0.0
    hidden: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not (self.kl or self.cross_entropy or self.hidden):
            raise ValueError("kl: expected a weight above 0 for one of kl, cross_entropy, hidden, found none")

    @staticmethod
    def of(stage: "Heal | Rounded") -> "Objective":
        """What a stage of a recipe says."""
        return Objective(stage.kl, stage.cross_entropy, stage.hidden, stage.temperature)

    @property
    def needs_teacher(self) -> bool:
        """Whether the teacher has to be run beside the student."""
        return self.kl > 0 or self.hidden > 0


def objective_loss(objective: Objective, student: Any, teacher: Any | LogitsCache | None, batch: Tensor) -> Loss:
    """The weighted loss of transformers models on windows (B, length + 1) int64.

    teacher  a model, or its kept answers: each window then begins with its number. None where the objective does not
             ask for one: ValueError where it does.
    """
    watched = objective.hidden > 0
    numbers = None
    if isinstance(teacher, LogitsCache):
        numbers, batch = batch[:, 0], batch[:, 1:]
    inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
    given = student(input_ids=inputs, use_cache=False, output_hidden_states=watched)
    rows = given.logits.flatten(0, 1)
    parts: dict[str, Tensor] = {}
    if isinstance(teacher, LogitsCache):
        assert numbers is not None
        answers = teacher.take(numbers.cpu()).to(given.logits.device)
        parts["kl"] = answers.divergence(given.logits, "forward_kl")
    elif objective.needs_teacher:
        if teacher is None:
            raise ValueError("an objective with kl or hidden states needs a teacher, found none")
        with torch.no_grad():
            wanted = teacher(input_ids=inputs, use_cache=False, output_hidden_states=watched)
        if objective.kl:
            parts["kl"] = forward_kl(rows, wanted.logits.flatten(0, 1), objective.temperature)
        if watched:
            parts["hidden"] = hidden_distance(given.hidden_states, wanted.hidden_states)
    if objective.cross_entropy:
        parts["cross_entropy"] = cross_entropy(rows, labels)
    total = torch.stack([getattr(objective, name) * value for name, value in parts.items()]).sum()
    return Loss(total, {name: float(value.detach()) for name, value in parts.items()})


def hidden_distance(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
    """Mean over blocks of the squared distance of states (B, T, H) over the teacher's mean square.

    The first state of both is the embedding's, which is not compared. Where the two have different numbers of blocks
    only their last outputs stand for the same thing.
    """
    same = len(student) == len(teacher)
    pairs = zip(student[1:], teacher[1:], strict=True) if same else [(student[-1], teacher[-1])]
    found = []
    for mine, theirs in pairs:
        wanted = theirs.flatten(0, -2).float()
        found.append(hidden_mse(mine.flatten(0, -2), wanted) / wanted.square().mean().clamp(min=1e-12))
    return torch.stack(found).mean()
