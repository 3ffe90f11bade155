"""A round whose drafts are known only when the target has judged them: one wait for the device, for both."""

from collections.abc import Sequence

from torch import Tensor

from runtime.contract import Cache, Out, Rows
from runtime.engine.round import Work
from runtime.model.on_device import NON_FINITE, DeviceRounds, RowSampling
from runtime.sampling.distribution import not_finite
from runtime.speculative.deferred import DeferredDrafter, DeferredDrafts
from runtime.speculative.draft import Draft, Drafter
from runtime.speculative.verify import require_sound


class DeferredRound:
    """Drafts on their way from a drafter to the target, by the requests' numbers."""

    def __init__(
        self,
        decoder: DeviceRounds,
        drafter: DeferredDrafter,
        work: Sequence[Work],
        later: DeferredDrafts,
        began: object,
    ):
        """`work`: all parts of the round; those with a budget were asked. `began`: the mark before drafting."""
        self._decoder, self._drafter, self._work, self._later = decoder, drafter, work, later
        self._began, self._drafted = began, decoder.mark()
        self._asked = [part for part in work if part.budget > 0]
        # Placeholders: how long each draft is says where its tokens go.
        self.unknown = {part.one.number: Draft() for part in self._asked}
        for i, count in zip(later.chains, later.counts, strict=True):
            self.unknown[self._asked[i].one.number] = Draft([0] * count, list(range(-1, count - 1)))

    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, at: Tensor | None) -> Out:
        """The target's forward of `rounds.rows_of(work, unknown)`, with the drafts' tokens."""
        places: list[int] = []
        base = 0
        for part in self._work:
            base += part.fed
            draft = self.unknown.get(part.one.number)
            count = 0 if draft is None else len(draft.tokens)
            places += range(base, base + count)
            base += count
        return self._decoder.forward_drafted(tokens, rows, cache, at, self._later.flat, places)

    def settle(self, asked: Sequence[RowSampling], logits: Tensor) -> tuple[list[int], dict[int, Draft]]:
        """The choice at each row of logits, and the drafts by number. Waits for the device.

        Raises UserError where logits of either model were no numbers.
        """
        choices, tokens = self._decoder.next_tokens(logits, asked, self._later.tokens)
        drafts = self._drafter.settle([part.one.request for part in self._asked], self._later, tokens)
        for draft, part in zip(drafts, self._asked, strict=True):
            require_sound(draft, part.budget, logits.shape[1])
        return require_finite(choices), {part.one.number: d for part, d in zip(self._asked, drafts, strict=True)}

    @property
    def seconds(self) -> float:
        """What drafting took the device; known once `settle` has waited."""
        return self._decoder.between(self._began, self._drafted)


def begin_deferred(decoder: DeviceRounds, drafter: Drafter, work: Sequence[Work]) -> DeferredRound | None:
    """Begins a round's drafts without waiting for them; None where the drafter cannot, or nobody drafts."""
    drafting = [part for part in work if part.budget > 0]
    if not drafting or not isinstance(drafter, DeferredDrafter):
        return None
    began = decoder.mark()
    requests, budgets = [part.one.request for part in drafting], [part.budget for part in drafting]
    later = drafter.propose_deferred(requests, budgets, decoder.device)
    return None if later is None else DeferredRound(decoder, drafter, work, later, began)


def require_finite(choices: list[int]) -> list[int]:
    """The target's choices. Raises UserError where logits were no numbers."""
    if NON_FINITE in choices:
        raise not_finite("target")
    return choices
