"""What the loop asks of whatever is trained, and of what it is trained on."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor, nn

# (stage, done, total), as everywhere in a run.
Progress = Callable[[str, int, int], None]
Note = Callable[[str], None]


@dataclass(frozen=True)
class Group:
    """Parameters that are trained alike.

    rate_factor   of the settings' rate.
    weight_decay  None: the settings'.
    optimizer     muon (Jordan et al. 2024) is for matrices inside the blocks; its rate is on AdamW's scale.
    """

    name: str
    parameters: list[nn.Parameter]
    rate_factor: float = 1.0
    weight_decay: float | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"


@dataclass(frozen=True)
class Loss:
    """`value` is the mean over the micro-batch, a scalar with its graph; `parts`, for people, what it is made of."""

    value: Tensor
    parts: dict[str, float] = field(default_factory=dict)


class Task(Protocol):
    """Something that can be trained. It may use torch's random numbers: the loop seeds them before each loss."""

    def groups(self) -> list[Group]:
        """The parameters; the same ones in the same order every time."""
        ...

    def loss(self, batch: Tensor, progress: float) -> Loss:
        """batch (B, length + 1) int64 on the parameters' device; progress 0 to 1 is the share of steps done."""
        ...

    def evaluate(self) -> float:
        """Held-out loss in nats of what would be written now; lower is better."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The weights that a checkpoint has to keep, the trained ones and what else changes."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state` gave."""
        ...


class Batches(Protocol):
    """Where batches come from: a pure function, so that a resumed run needs no reader's state."""

    def take(self, step: int, micro: int) -> Tensor:
        """This process's rows of a micro-batch: (B / processes, length + 1) int64."""
        ...


def matrices_and_rest(parameters: Iterable[tuple[str, nn.Parameter]], matrix_decay: float | None = None) -> list[Group]:
    """Two groups of the parameters that want gradients: matrices, with weight decay, and norms and biases without."""
    wanted = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    matrices = [parameter for _, parameter in wanted if parameter.dim() >= 2]
    rest = [parameter for _, parameter in wanted if parameter.dim() < 2]
    groups = [Group("matrices", matrices, weight_decay=matrix_decay), Group("norms and biases", rest, weight_decay=0.0)]
    return [group for group in groups if group.parameters]
