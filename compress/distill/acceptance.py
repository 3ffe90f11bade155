"""How well a draft predicts its target, before and after it was trained."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from runtime.loading import Model

DRAFT_LENGTH = 4


@dataclass(frozen=True)
class Acceptance:
    """acceptance_rate  accepted over drafted tokens, greedy, at γ = 4; tokens_per_round goes with it.
    agreement        share of positions of held-out text at which both have the same most probable token.
    agreement_t1     mean Σ min(p, q) there: the chance that a token drawn at temperature 1 is accepted.
    """

    acceptance_rate: float | None
    tokens_per_round: float | None
    agreement: float
    agreement_t1: float

    def to_dict(self) -> dict[str, float | None]:
        """Plain JSON data."""
        return asdict(self)


def measure(
    target: "Model", draft: "Model", windows: Tensor, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Acceptance:
    """Both ways of asking: `prompts` continued by speculation, and windows (E, L) int64 read by both.

    Greedy decoding and fixed windows: a pure function of the models. acceptance_rate is None where nothing was drafted.
    """
    from compress.report.speed import teacher_forced_agreement
    from runtime.metrics import total
    from runtime.speculate import Speculator

    speculator = Speculator(target, draft, DRAFT_LENGTH)
    found = total([result.metrics for result in speculator.generate(prompts, new_tokens, stop=())])
    agreement, overlap = teacher_forced_agreement(target, draft, windows)
    return Acceptance(found.acceptance_rate, found.tokens_per_round, agreement, overlap)
