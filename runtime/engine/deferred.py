"""A round whose drafts are known only when the target has verified them: one wait for the device, for both."""

from collections.abc import Sequence

from torch import Tensor

from runtime.contract import Cache, Out, Rows
from runtime.engine.round import ScheduledRequest, aligned
from runtime.model.on_device import NON_FINITE, DeviceRounds, RowSampling
from runtime.sampling.distribution import not_finite
from runtime.speculative.deferred import DeferredDrafter, DeferredDrafts
from runtime.speculative.draft import Draft, Drafter
from runtime.speculative.verify import require_sound


class DeferredRound:
    """Drafts on their way from a drafter to the target.

    placeholders  a draft for each part of the round, of the right length and of no meaning.
    """

    def __init__(
        self,
        decoder: DeviceRounds,
        drafter: DeferredDrafter,
        batch: Sequence[ScheduledRequest],
        deferred: DeferredDrafts,
        began: object,
    ):
        """`batch`: all parts of the round; those with a budget were asked for. `began`: the mark before drafting."""
        self._decoder, self._drafter, self._batch, self._deferred = decoder, drafter, batch, deferred
        self._began, self._drafted = began, decoder.mark()
        self._drafting = [part for part in batch if part.budget > 0]
        self.placeholders = aligned(batch, [Draft.chain([0] * count) for count in deferred.counts])

    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, at: Tensor | None) -> Out:
        """The target's forward of `round.forward_rows(batch, placeholders)`, with the drafts' tokens."""
        places: list[int] = []
        base = 0
        for part, draft in zip(self._batch, self.placeholders, strict=True):
            base += part.fed
            places += range(base, base + len(draft.tokens))
            base += len(draft.tokens)
        return self._decoder.forward_drafted(tokens, rows, cache, at, self._deferred.flat, places)

    def settle(self, samplings: Sequence[RowSampling], logits: Tensor) -> tuple[list[int], list[Draft]]:
        """The token at each row of logits, and each part's draft. Waits for the device.

        Raises UserError where logits of either model are not finite.
        """
        found, tokens = self._decoder.next_tokens(logits, samplings, self._deferred.tokens)
        drafts = self._drafter.settle([part.state.request for part in self._drafting], self._deferred, tokens)
        for draft, part in zip(drafts, self._drafting, strict=True):
            require_sound(draft, part.budget, logits.shape[1])
        return require_finite(found), aligned(self._batch, drafts)

    @property
    def seconds(self) -> float:
        """What drafting took the device; known once `settle` has waited."""
        return self._decoder.between(self._began, self._drafted)


def begin_deferred(decoder: DeviceRounds, drafter: Drafter, batch: Sequence[ScheduledRequest]) -> DeferredRound | None:
    """Begins a round's drafts, of which there are some, without waiting for them; None where the drafter cannot."""
    if not isinstance(drafter, DeferredDrafter):
        return None
    drafting = [part for part in batch if part.budget > 0]
    began = decoder.mark()
    requests, budgets = [part.state.request for part in drafting], [part.budget for part in drafting]
    deferred = drafter.propose_deferred(requests, budgets, decoder.device)
    return None if deferred is None else DeferredRound(decoder, drafter, batch, deferred, began)


def require_finite(tokens: list[int]) -> list[int]:
    """The target's tokens. Raises UserError where logits were not finite."""
    if NON_FINITE in tokens:
        raise not_finite("target")
    return tokens
