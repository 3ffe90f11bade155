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

from runtime.drafters import Draft, Request
from runtime.drafters.candidates import Candidates
from runtime.rows import Cache, Out, Rows
from runtime.sampling import Sampling
from runtime.verify import Rule


@dataclass(frozen=True)
class Asked:
    """How a row's token is chosen: sampling that is `plain`, and the token's absolute position in its text."""

    sampling: Sampling
    position: int


# For rows whose choice a rule on the host will make: the argmax tells whether their logits are numbers.
ARGMAX = Asked(Sampling(), 0)
# The choice in a row of logits that are no numbers.
BROKEN = -1


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
        """rows.GreedyChains' `continue_greedy`, without waiting and by any `plain` sampling with `coupled`'s noise.

        samplings  one for each request in order; None: all greedy.
        Returns (requests, max(steps)) int64 on the device: BROKEN where logits were no numbers, anything from there on
        and behind a request's last step.
        """

    def mark(self) -> object:
        """A moment in the device's work: all that was given to it before."""

    def between(self, first: object, second: object) -> float:
        """Seconds of the device from one mark to another; both must have passed."""

    def forward_drafted(
        self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None, drafted: Tensor, places: Sequence[int]
    ) -> Out:
        """`forward`, of which the rows `places` have the tokens `drafted` (n,) int64 on the device instead."""

    def choices(
        self, logits: Tensor, asked: Sequence[Asked], drafted: Tensor | None = None
    ) -> tuple[list[int], list[list[int]]]:
        """The token of each of (n, V) rows, or BROKEN, and with the same wait the rows of `drafted` (m, k) int64."""


@runtime_checkable
class RanksRows(Protocol):
    """A decoder whose rows of logits need not be read to learn which tokens may follow."""

    def candidates(self, logits: Tensor, asked: Sequence[Asked], count: int, limit: int) -> Sequence[Candidates | None]:
        """For each of (n, V) rows up to `count` tokens below `limit`, as candidates.ranked gives them; in one copy.

        A greedy row's are its most probable ones, another's those of highest probability with `coupled`'s noise. None
        where a row's logits are no numbers. All samplings must be `plain`.
        """


@dataclass(frozen=True)
class Later:
    """Chains whose tokens are still on their way.

    tokens  (n, most) int64 on the device, as DeviceRounds.draft returns them.
    counts  how many of each row's are the draft, 1 or more.
    chains  which of the requests that were asked for have them, in order.
    """

    tokens: Tensor
    counts: list[int]
    chains: list[int]

    @property
    def flat(self) -> Tensor:
        """(sum of counts,) the drafts' tokens one after the other."""
        rows, most = self.tokens.shape
        if self.counts == [most] * rows:
            return self.tokens.flatten()
        return torch.cat([self.tokens[i, :count] for i, count in enumerate(self.counts)])


@runtime_checkable
class DraftsLater(Protocol):
    """What a drafter may offer besides its contract, for targets that are DeviceRounds on the same device."""

    def propose_later(self, requests: Sequence[Request], budgets: Sequence[int], device: torch.device) -> Later | None:
        """Drafts without waiting for the tokens; None, with nothing changed, where this drafter cannot."""

    def settle(self, requests: Sequence[Request], later: Later, tokens: Sequence[Sequence[int]]) -> list[Draft]:
        """One draft per request of the same call, now that the tokens of `later` are known.

        Raises UserError where the draft's logits were no numbers.
        """


def chosen_there(sampling: Sampling, rule: Rule) -> bool:
    """Whether a request's tokens can be chosen on the device."""
    return sampling.plain and (sampling.greedy or rule == "coupled")
