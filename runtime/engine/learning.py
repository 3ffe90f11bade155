"""What a round tells: the controllers, which set γ, and those who choose among drafters."""

from collections import Counter
from collections.abc import Mapping, Sequence

from runtime.engine.round import Proposer, ScheduledRequest
from runtime.speculative.by_drafter import Taken
from runtime.speculative.draft import Draft, Outcome
from runtime.speculative.measured import Drafted, Round


def learn(
    batch: Sequence[ScheduledRequest],
    drafts: Sequence[Draft],
    outcomes: Sequence[Outcome | None],
    times: Sequence[float],
    seconds: Mapping[Proposer, float],
    before: float = 0.0,
) -> None:
    """Tells the controllers of a round, unless a request read of its prompt; arguments: see `round.shares_of`.

    seconds  what each drafter took. Where several share the round the target's time counts by rows.
    before   seconds of the round before after its times: learning from it, most of which is where something was
             drafted, and settling it, which rounds of few tokens do as often as those of many. Of one text alone it
             counts for who is chosen to draft. γ has what it costs bounded otherwise.
    """
    if not all(part.decoding for part in batch):
        return
    if len(batch) == 1:
        _learn_of_one(batch[0], drafts[0], outcomes[0], times, seconds, before)
        return
    if any(part.state.asked.choice is not None for part in batch):
        _weigh(batch, drafts, outcomes, times, seconds)
    proposers = {part.state.proposer for part in batch}
    started, drafted, _, ended = times
    alone = len(proposers) == 1 and not any(part.state.forced for part in batch)
    width = len(drafts) + sum([len(draft.tokens) for draft in drafts])
    for proposer in proposers:
        if proposer.controller is None:
            continue
        ours = range(len(batch)) if alone else _ours(batch, proposer)
        if not ours:
            continue
        rows = width if alone else len(ours) + sum([len(drafts[i].tokens) for i in ours])
        drafting = seconds.get(proposer, drafted - started if alone else 0.0)
        _learn(proposer, ours, batch, drafts, outcomes, (rows, drafting, (ended - drafted) * rows / width))


def _learn_of_one(
    part: ScheduledRequest,
    draft: Draft,
    outcome: Outcome | None,
    times: Sequence[float],
    seconds: Mapping[Proposer, float],
    before: float,
) -> None:
    """`learn` where one request goes on alone: small models feel what this takes."""
    state, budget = part.state, part.budget
    if state.forced:
        return
    proposer, choice, (started, drafted, _, ended) = state.proposer, state.asked.choice, times
    # Choosing γ is part of what a drafter costs, but not of what drafts of this γ take. Deferred ones were not timed
    # apart.
    drafting = seconds.get(proposer, drafted - started)
    rows, rest = 1 + len(draft.tokens), ended - drafted
    asking = drafted - started - drafting if budget > 0 else 0.0
    if choice is not None and outcome is not None:
        own = drafting if budget > 0 else 0.0
        choice.observe(state.number, Taken(1 + outcome.length, rows, own, rest + before, asking, draft.number))
    controller = proposer.controller
    if controller is None:
        return
    if proposer.resting:
        controller.rested(ended - started)
        return
    told: tuple[Drafted, ...] = ()
    if budget > 0 and outcome is not None:
        told = (Drafted(len(draft.tokens), outcome.length, draft.is_chain, outcome.path, draft.number),)
    unread = part.end - state.read if budget > 0 and not state.drafted else 0
    controller.observe(Round(1, budget, told, rows, drafting, rest, unread, proposer.asked, asking))


def _weigh(
    batch: Sequence[ScheduledRequest],
    drafts: Sequence[Draft],
    outcomes: Sequence[Outcome | None],
    times: Sequence[float],
    seconds: Mapping[Proposer, float],
) -> None:
    """Tells those who choose among drafters what each text's part of the round gained and took; as for `learn`."""
    started, drafted, _, ended = times
    width = sum(1 + len(draft.tokens) for draft in drafts)
    shares = Counter(part.state.proposer for part in batch if part.budget > 0 and not part.state.forced)
    for part, draft, outcome in zip(batch, drafts, outcomes, strict=True):
        state = part.state
        if state.asked.choice is None or outcome is None or state.forced:
            continue
        # Deferred drafts are one drafter's, and were not timed apart.
        drafting = seconds.get(state.proposer, drafted - started if len(shares) == 1 else 0.0)
        own = drafting / shares[state.proposer] if part.budget > 0 else 0.0
        rows = 1 + len(draft.tokens)
        rest = (ended - drafted) * rows / width
        state.asked.choice.observe(state.number, Taken(1 + outcome.length, rows, own, rest, number=draft.number))


def _ours(batch: Sequence[ScheduledRequest], proposer: Proposer) -> list[int]:
    return [i for i, part in enumerate(batch) if part.state.proposer is proposer and not part.state.forced]


def _learn(
    proposer: Proposer,
    ours: Sequence[int],
    batch: Sequence[ScheduledRequest],
    drafts: Sequence[Draft],
    outcomes: Sequence[Outcome | None],
    cost: tuple[int, float, float],
) -> None:
    """Tells one controller of its requests' part of a round: rows, seconds of drafting and of the rest."""
    controller, (rows, drafting, rest) = proposer.controller, cost
    if controller is None:
        return
    if controller.resting(len(ours)):
        controller.rested(drafting + rest)
        return
    budget = max([batch[i].budget for i in ours])
    found = [
        Drafted(len(drafts[i].tokens), outcome.length, drafts[i].is_chain, outcome.path, drafts[i].number)
        for i in ours
        # A text about to end drafts less than the others: that says nothing of this γ.
        if (outcome := outcomes[i]) is not None and batch[i].budget == budget > 0
    ]
    behind = [batch[i] for i in ours if batch[i].budget > 0 and not batch[i].state.drafted]
    unread = sum([part.end - part.state.read for part in behind])
    controller.observe(Round(len(ours), budget, found, rows, drafting, rest, unread, proposer.asked))
