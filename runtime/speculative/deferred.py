"""Drafts that stay on the device until the target has verified them: what such a drafter offers the loop.

A draft model on the target's device need not be waited for: its tokens go to the target's forward there, and the host
reads drafts and verified tokens together (model/on_device.py is the decoder's side of it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from runtime.sampling.params import Sampling
from runtime.speculative.draft import Draft, Request
from runtime.speculative.verify import Rule


@dataclass(frozen=True)
class DeferredDrafts:
    """Chains whose tokens are still on their way.

    tokens  (n, most) int64 on the device, as DeviceRounds.draft returns them.
    counts  how many tokens are drafted for each of the requests that were asked for; rows are of those with any.
    """

    tokens: Tensor
    counts: list[int]

    @property
    def flat(self) -> Tensor:
        """(sum of counts,) the drafts' tokens one after the other."""
        drafted = [count for count in self.counts if count]
        if drafted == [self.tokens.shape[1]] * len(drafted):
            return self.tokens.flatten()
        return torch.cat([row[:count] for row, count in zip(self.tokens, drafted, strict=True)])


@runtime_checkable
class DeferredDrafter(Protocol):
    """What a drafter may offer besides its contract, for targets that are DeviceRounds on the same device."""

    def propose_deferred(
        self, requests: Sequence[Request], budgets: Sequence[int], device: torch.device
    ) -> DeferredDrafts | None:
        """Drafts without waiting for the tokens; None, with nothing changed, where this drafter cannot."""

    def settle(
        self, requests: Sequence[Request], deferred: DeferredDrafts, tokens: Sequence[Sequence[int]]
    ) -> list[Draft]:
        """One draft per request of the same call, now that the tokens of `deferred` are known.

        Raises UserError where the draft's logits were not finite.
        """


def sampled_on_device(sampling: Sampling, rule: Rule) -> bool:
    """Whether a request's tokens can be sampled on the device."""
    return sampling.plain and (sampling.greedy or rule == "coupled")
