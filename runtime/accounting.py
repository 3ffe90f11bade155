"""What a round took and gained: each request's share of it, and what the controller learns of it."""

from collections.abc import Sequence
from typing import NamedTuple

from runtime.controller import Controller, Drafted, Round
from runtime.drafters import Draft, Outcome
from runtime.rounds import EMPTY, Work
from runtime.verify import depths


class Counted(NamedTuple):
    """One round: how many of its requests went on with their text, each draft with its budget, the forward's rows.

    draft_seconds, rest_seconds  wall time until the drafts were there, and from then to the round's end.
    """

    decoding: int
    drafts: list[tuple[int, Drafted]]
    width: int
    draft_seconds: float
    rest_seconds: float


def account(
    work: Sequence[Work],
    drafts: dict[int, Draft],
    outcomes: Sequence[Outcome],
    lengths: Sequence[int],
    times: tuple[float, float, float, float],
    width: int,
) -> Counted:
    """Counts the round, and gives each request its share of the time: of drafting by heads, of the rest by rows.

    outcomes, lengths  of each part that was judged, in order: what came of it, and its text's length before.
    times              when the round began, its drafts were there, they were judged, and all was done.
    width              rows of the forward.
    """
    started, drafted, verified, ended = times
    settled = iter(zip(outcomes, lengths, strict=True))
    learned: list[tuple[int, Drafted]] = []
    decoding = 0
    for part in work:
        m, draft = part.one.metrics, drafts.get(part.one.number, EMPTY)
        rows = part.fed + len(draft.tokens)
        target_share = rows / width
        draft_share = 1 / len(drafts) if part.one.number in drafts else 0.0
        spent = (drafted - started) * draft_share + (ended - drafted) * target_share
        if not drafts:
            spent += (drafted - started) * target_share
        m.seconds += spent
        outcome, length = next(settled) if part.judged else (None, 0)
        if outcome is None or not part.decoding:
            m.prompt_seconds += spent
            continue
        at = depths(draft)
        drafting = (drafted - started) * draft_share
        if not m.drafted:
            m.first_seconds += drafting
            m.first_drafted = len(at)
        m.count_draft(at, [at[i] for i in outcome.path])
        m.rounds += 1
        m.gained += len(part.one.request.tokens) - length
        m.target_forwards += 1
        m.target_rows += rows
        m.draft_seconds += drafting
        m.target_seconds += (verified - drafted) * target_share
        decoding += 1
        if part.budget > 0:
            chain = draft.parents == [*range(-1, len(at) - 1)]
            learned.append((part.budget, Drafted(len(at), outcome.length, chain)))
    return Counted(decoding, learned, width, drafted - started, ended - drafted)


def learn(controller: Controller, work: Sequence[Work], counted: Counted) -> None:
    """Tells the controller of a round in which every request went on with its text."""
    if controller.resting(len(work)):
        controller.rested(counted.draft_seconds + counted.rest_seconds)
        return
    whole: tuple[Drafted, ...] = ()
    budget, behind = 0, False
    if counted.drafts:
        budget = max(own for own, _ in counted.drafts)
        # A text about to end drafts less than the others: that says nothing of this γ.
        whole = tuple(one for own, one in counted.drafts if own == budget)
        behind = any(part.budget > 0 and not part.one.drafted for part in work)
    seconds = (counted.draft_seconds, counted.rest_seconds)
    controller.observe(Round(len(work), budget, whole, counted.width, *seconds, behind))
