"""The target's hidden states on their way to the drafters that read them (contract.TakesStates)."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from runtime.contract import Decoder, TakesStates
from runtime.engine.round import Proposer, ScheduledRequest
from runtime.errors import UserError
from runtime.model.on_device import DeviceRounds
from runtime.speculative.draft import Draft, Outcome, StateReader, TakenStates


class Readers:
    """Those of an engine's drafters that read hidden states.

    by_proposer  the drafter of each.
    taps         what they read, all of them together; (): nothing.
    """

    def __init__(self, proposers: Iterable[Proposer]) -> None:
        self.by_proposer: dict[Proposer, StateReader] = {}
        for proposer in proposers:
            if proposer.most > 0 and isinstance(proposer.drafter, StateReader) and proposer.drafter.taps:
                self.by_proposer[proposer] = proposer.drafter
        self.taps = tuple(sorted({tap for reader in self.by_proposer.values() for tap in reader.taps}))

    def parts(
        self,
        batch: Sequence[ScheduledRequest],
        drafts: Sequence[Draft],
        outcomes: Sequence[Outcome | None],
        taken: Tensor,
    ) -> dict[Proposer, list[TakenStates]]:
        """What each of them is to read after a round, of the forward's states (T, taps · hidden) of the taps."""
        found: dict[Proposer, list[TakenStates]] = {}
        for part, states in _kept(batch, drafts, outcomes, taken):
            reader = self.by_proposer.get(part.state.asked)
            if reader is not None:
                found.setdefault(part.state.asked, []).append(states.of(self.taps, reader.taps))
        return found


def with_taps(decoder: Decoder, taps: Sequence[int]) -> tuple[Decoder, Decoder]:
    """The decoder for rounds whose states nobody reads, and for those in which drafters read them.

    Raises UserError for a decoder that gives no hidden states.
    """
    if not taps:
        return decoder, decoder
    if not isinstance(decoder, TakesStates):
        raise UserError(
            "the drafter reads the target's hidden states, which only Specpress' own kernels give, and "
            f"{decoder.kernels} run this target; use another drafter"
        )
    tapped = decoder.tapped(taps)
    # On a device states cost nothing, and graphs of its own for rounds without them would.
    return (tapped if isinstance(tapped, DeviceRounds) else decoder), tapped


def _kept(
    batch: Sequence[ScheduledRequest], drafts: Sequence[Draft], outcomes: Sequence[Outcome | None], taken: Tensor
) -> Iterator[tuple[ScheduledRequest, TakenStates]]:
    """Of each part whose text goes on, the rows that stayed in it: what was fed, and the accepted path."""
    base, rows = 0, taken.shape[0]
    for part, draft, outcome in zip(batch, drafts, outcomes, strict=True):
        drafted, request = base + part.fed, part.state.request
        if not request.finished and (outcome is not None or not part.samples):
            path = [] if outcome is None else outcome.path
            if not path and part.fed == rows:
                states = taken  # most rounds without a draft: there is nothing to cut out
            elif path == [*range(len(path))]:
                states = taken[base : drafted + len(path)]
            else:
                states = taken[[*range(base, drafted), *(drafted + i for i in path)]]
            yield part, TakenStates(request, part.first, states)
        base = drafted + len(draft.tokens)
