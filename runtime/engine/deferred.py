"""A round whose drafts are known only when the target has verified them: one wait for the device, for both."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from runtime.contract import Cache, Out, Rows
from runtime.engine.round import ScheduledRequest, aligned
from runtime.model.on_device import NON_FINITE, DeviceRounds, RowSampling
from runtime.sampling.distribution import not_finite
from runtime.speculative.draft import DeferredDrafter, DeferredDrafts, Draft, Drafter, Request
from runtime.speculative.verify import require_sound


@dataclass(frozen=True, eq=False)
class DeferredRound:
    """Drafts on their way from a drafter to the target, for the parts of a round with a budget.

    batch           all parts of the round; `drafting`: the requests with a budget.
    began, drafted  the device's marks before and after drafting.
    placeholders    a draft for each part of the round, of the right length and of no meaning.
    """

    decoder: DeviceRounds
    drafter: DeferredDrafter
    batch: Sequence[ScheduledRequest]
    drafting: Sequence[Request]
    deferred: DeferredDrafts
    began: object
    drafted: object
    placeholders: list[Draft]

    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, at: Tensor | None) -> Out:
        """The target's forward of `round.forward_rows(batch, placeholders)`, with the drafts' tokens."""
        places: list[int] = []
        base = 0
        for part, draft in zip(self.batch, self.placeholders, strict=True):
            base += part.fed
            places += range(base, base + len(draft.tokens))
            base += len(draft.tokens)
        return self.decoder.forward_drafted(tokens, rows, cache, at, self.deferred.flat, places)

    def choose(self, samplings: Sequence[RowSampling], logits: Tensor) -> tuple[list[int], list[list[int]]]:
        """The token at each row of logits (NON_FINITE: they were no numbers), and the drafts' tokens.

        Waits for the device.
        """
        return self.decoder.next_tokens(logits, samplings, self.deferred.tokens)

    def settle(self, tokens: Sequence[Sequence[int]], vocab_size: int) -> list[Draft]:
        """Each part's draft, now that its tokens are known.

        Raises UserError where the draft's logits are not finite.
        """
        drafts = aligned(self.batch, self.drafter.settle(self.drafting, self.deferred, tokens))
        for draft, part in zip(drafts, self.batch, strict=True):
            require_sound(draft, part.budget, vocab_size)
        return drafts

    @property
    def seconds(self) -> float:
        """What drafting took the device; known once `settle` has waited."""
        return self.decoder.between(self.began, self.drafted)


def begin_deferred(decoder: DeviceRounds, drafter: Drafter, batch: Sequence[ScheduledRequest]) -> DeferredRound | None:
    """Begins a round's drafts, of which there are some, without waiting for them; None where the drafter cannot."""
    if not isinstance(drafter, DeferredDrafter):
        return None
    began, drafting = decoder.mark(), [part.state.request for part in batch if part.budget > 0]
    deferred = drafter.propose_deferred(drafting, [part.budget for part in batch if part.budget > 0], decoder.device)
    if deferred is None:
        return None
    placeholders = aligned(batch, [Draft.chain([0] * count) for count in deferred.counts])
    return DeferredRound(decoder, drafter, batch, drafting, deferred, began, decoder.mark(), placeholders)


def require_finite(tokens: list[int]) -> list[int]:
    """The target's tokens. Raises UserError where logits were not finite."""
    if NON_FINITE in tokens:
        raise not_finite("target")
    return tokens
