"""What a decoder may offer besides its contract: rounds that leave drafts and logits where they are.

Without it, a round waits for the device after the draft, after the forward, and for each row of logits that a rule
reads. With it, the draft's tokens go to the target's forward on the device, each row's token is chosen there, and the
host reads drafts and choices together. The rules stay those of verify.py: greedy and `coupled` accept the path on which
the draft has the token that the target chooses, so the host only needs the choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from runtime.contract import Cache, Out, Rows
from runtime.sampling.candidates import Candidates
from runtime.sampling.params import Sampling


@dataclass(frozen=True)
class RowSampling:
    """How a row's token is chosen: sampling that is `plain`, and the token's absolute position in its text."""

    sampling: Sampling
    position: int


# For rows whose choice a rule on the host will make: the argmax tells whether their logits are numbers.
ARGMAX = RowSampling(Sampling(), 0)
# The choice in a row of logits that are no numbers.
NON_FINITE = -1


@runtime_checkable
class DeviceRounds(Protocol):
    """Rounds with one wait. A text's tokens must all be chosen this way, or all on the host: rounding differs."""

    vocab_size: int
    device: torch.device

    def draft(
        self,
        tokens: Tensor,
        rows: Rows,
        cache: Cache,
        steps: Sequence[int],
        limit: int,
        samplings: Sequence[Sampling] | None = None,
    ) -> Tensor:
        """contract.GreedyChains' `continue_greedy`, without waiting and by any `plain` sampling with `coupled`'s noise.

        samplings  one for each request in order; None: all greedy.
        Returns (requests, max(steps)) int64 on the device: NON_FINITE where logits were no numbers, and then
        anything, as behind a request's last step.
        """

    def mark(self) -> object:
        """A moment in the device's work: all that was given to it before."""

    def between(self, first: object, second: object) -> float:
        """Seconds of the device from one mark to another; both must have passed."""

    def forward_drafted(
        self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None, drafted: Tensor, places: Sequence[int]
    ) -> Out:
        """`forward`, of which the rows `places` have the tokens `drafted` (n,) int64 on the device instead."""

    def next_tokens(
        self, logits: Tensor, asked: Sequence[RowSampling], drafted: Tensor | None = None
    ) -> tuple[list[int], list[list[int]]]:
        """The token of each of (n, V) rows, or NON_FINITE; with the same wait the rows of `drafted` (m, k) int64."""

    def candidates(
        self, logits: Tensor, asked: Sequence[RowSampling], count: int, limit: int
    ) -> Sequence[Candidates | None]:
        """For each of (n, V) rows up to `count` tokens below `limit`, as candidates.ranked gives them; in one copy.

        A greedy row's are its most probable ones, another's those of highest probability with `coupled`'s noise. None
        where a row's logits are no numbers. All samplings must be `plain`.
        """
