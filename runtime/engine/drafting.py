"""Who drafts for whom in a round, and how much: an engine's drafters, each with the γ that pays for it.

Requests of one drafter are asked for together. What a request's grammar forces comes before its drafter: such a round
costs no draft, and the drafter learns nothing from it.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from runtime.engine.deferred import DeferredRound, begin_deferred
from runtime.engine.round import NO_DRAFT, Proposer, RequestState, ScheduledRequest, refused
from runtime.engine.taken import Readers
from runtime.errors import UserError
from runtime.model.on_device import DeviceRounds
from runtime.sampling.constraint import Constraint
from runtime.speculative.choice import GREEDY, KINDS, SAMPLED, Choice
from runtime.speculative.draft import Draft, Drafter, NoDrafter, Outcome
from runtime.speculative.draft_length import LONGEST, Controller
from runtime.speculative.drafters.fallback import ChosenDrafter
from runtime.speculative.drafters.paced import paced
from runtime.speculative.verify import require_sound

NONE, GRAMMAR = "none", "grammar"


class Drafters:
    """The drafters of an engine by name; "none" and "grammar" (forced tokens alone) are always among them.

    drafters      the first is taken where a request names none.
    draft_length  γ of all; or a Controller, the first one's (others get their own); or one for each by name. Under a
                  controller drafters that copy are paced.
    lenient       a drafter that fails is left alone by the requests that it failed for, which go on without a draft;
                  otherwise what it raised is raised.
    """

    def __init__(
        self,
        drafters: Drafter | Mapping[str, Drafter],
        draft_length: int | Controller | Mapping[str, Controller],
        lenient: bool = False,
    ) -> None:
        given = dict(drafters) if isinstance(drafters, Mapping) else {drafters.name: drafters}
        if not given:
            raise ValueError("an engine needs at least one drafter")
        self._lenient = lenient
        self._nothing = Proposer(NONE, NoDrafter(), None, 0)
        self._by_name: dict[str, Proposer] = {}
        for name, drafter in given.items():
            controller, most = None, LONGEST
            if isinstance(draft_length, int):
                most = draft_length
            elif isinstance(draft_length, Controller):
                limit, widths = draft_length.limit, draft_length.widths
                controller = Controller(limit, widths=widths) if self._by_name else draft_length
            else:
                controller = draft_length[name]
            self._by_name[name] = _proposer(name, drafter, controller, most)
        self.readers = Readers(self._by_name.values())
        # Whether anybody is told what rounds took.
        self.learning = any(made.controller is not None or made.choice is not None for made in self._by_name.values())
        self._default = next(iter(self._by_name.values()))
        self._by_name.setdefault(NONE, self._nothing)
        self._by_name.setdefault(GRAMMAR, Proposer(GRAMMAR, NoDrafter(), None, 0))

    def named(self, name: str | None) -> Proposer:
        """The drafter of this name; None: the default. Raises UserError for an unknown one."""
        if name is None:
            return self._default
        if name not in self._by_name:
            raise UserError(f"drafter must be one of {', '.join(self._by_name)}, but is {name}; choose one of them.")
        return self._by_name[name]

    def budgets(self, decoding: Sequence[RequestState], alone: bool) -> dict[int, int]:
        """By number, how many tokens may be drafted for each of the requests that are decoding.

        alone  no prompt shares the forward.
        """
        for state in decoding:
            if state.asked.choice is not None:
                try:
                    _choose(state, state.asked.choice, len(decoding))
                except Exception as error:  # of a drafter that is watched
                    self.failed([state], error)
        first, asking = decoding[0].proposer, decoding
        found: dict[int, int] = {}
        for state in decoding:
            if state.request.grammar is not None or state.proposer is not first:
                break
        else:
            return _budgets(first, decoding, alone)
        for state in decoding:
            state.forced = self._forced(state)
            if state.forced:
                found[state.number] = len(state.forced)
        asking = [state for state in decoding if not state.forced]
        for proposer, states in _by_proposer(asking).items():
            found |= _budgets(proposer, states, alone)
        return found

    def draft(
        self,
        batch: Sequence[ScheduledRequest],
        on_device: DeviceRounds | None,
        vocab_size: int,
        now: Callable[[], float],
    ) -> tuple[list[Draft], DeferredRound | None, dict[Proposer, float]]:
        """A draft for each part of the round, and the seconds that each drafter took by the clock `now`.

        Of a deferred round, whose drafts are still on their way, the drafts are placeholders.
        """
        for part in batch:
            if part.budget > 0:
                break
        else:
            return [NO_DRAFT] * len(batch), None, {}
        only = self._only(batch) if on_device is not None else None
        if on_device is not None and only is not None:
            try:
                deferred = begin_deferred(on_device, only.drafter, batch)
            except Exception as error:
                self.failed([part.state for part in batch if part.budget > 0], error)
                return [NO_DRAFT] * len(batch), None, {}
            if deferred is not None:
                return deferred.placeholders, deferred, {}
        drafts, seconds = self._propose(batch, vocab_size, now)
        return drafts, None, seconds

    def settle(self, deferred: DeferredRound, tokens: Sequence[Sequence[int]], vocab_size: int) -> list[Draft]:
        """A deferred round's drafts, now that their tokens are known."""
        try:
            return deferred.settle(tokens, vocab_size)
        except Exception as error:
            self.failed([part.state for part in deferred.batch if part.budget > 0], error)
            return refused(deferred.placeholders)

    def _only(self, batch: Sequence[ScheduledRequest]) -> Proposer | None:
        """The drafter that all drafts of a round are asked of; None where they are several, or a grammar drafts."""
        asked = {part.state.proposer for part in batch if part.budget > 0}
        constrained = any(part.budget > 0 and part.state.request.grammar is not None for part in batch)
        return asked.pop() if len(asked) == 1 and not constrained else None

    def _propose(
        self, batch: Sequence[ScheduledRequest], vocab_size: int, now: Callable[[], float]
    ) -> tuple[list[Draft], dict[Proposer, float]]:
        drafts = [NO_DRAFT] * len(batch)
        asked: dict[Proposer, list[int]] = {}
        seconds: dict[Proposer, float] = {}
        for i, part in enumerate(batch):
            if part.budget > 0 and part.state.forced:
                drafts[i] = Draft.chain(list(part.state.forced))
            elif part.budget > 0:
                asked.setdefault(part.state.proposer, []).append(i)
        for proposer, places in asked.items():
            proposer.prepare()
            began = now()
            found = self._ask(proposer, [batch[i] for i in places], vocab_size)
            seconds[proposer] = now() - began
            for i, draft in zip(places, found, strict=True):
                grammar = batch[i].state.request.grammar
                drafts[i] = draft if grammar is None else pruned(draft, grammar)
        return drafts, seconds

    def observe(self, batch: Sequence[ScheduledRequest], outcomes: Sequence[Outcome | None]) -> None:
        """Tells each drafter what became of its requests' round."""
        told: dict[Proposer, list[Outcome]] = {}
        for part, outcome in zip(batch, outcomes, strict=True):
            if outcome is not None and part.state.asked.drafts and not part.state.asked.resting:
                told.setdefault(part.state.asked, []).append(outcome)
        for asked, found in told.items():
            try:
                # Of a choice every drafter: those that draft on the target's states need the last round's.
                asked.drafter.observe(found)
            except Exception as error:
                self.failed([part.state for part in batch if part.state.asked is asked], error)

    def reads(self, batch: Sequence[ScheduledRequest]) -> bool:
        """Whether somebody reads the target's hidden states of this round.

        All prompts are read, which hardly costs anything; of texts that go on those whose drafter does not rest.
        """
        if readers := self.readers.by_proposer:
            for part in batch:
                if part.state.asked in readers and not (part.decoding and part.state.asked.resting):
                    return True
        return False

    def read(
        self,
        batch: Sequence[ScheduledRequest],
        drafts: Sequence[Draft],
        outcomes: Sequence[Outcome | None],
        taken: Tensor,
    ) -> None:
        """Hands each drafter that reads the target's hidden states (T, taps · hidden) those of its requests."""
        for proposer, parts in self.readers.parts(batch, drafts, outcomes, taken).items():
            try:
                self.readers.by_proposer[proposer].read(parts)
            except Exception as error:
                self.failed([part.state for part in batch if part.state.asked is proposer], error)

    def close(self, state: RequestState) -> None:
        """The request has ended, or gives its place back: its drafter forgets it."""
        if state.asked.choice is not None:
            state.asked.choice.close(state.number)
        if not self._lenient:
            state.asked.drafter.close(state.request)
            return
        try:
            state.asked.drafter.close(state.request)
        except Exception as error:
            state.metrics.drafter_faults[_reason(error)] += 1

    def failed(self, states: Sequence[RequestState], error: Exception) -> None:
        """The drafter of these requests has failed: they go on without. Raises `error` where that is not allowed."""
        if not self._lenient:
            raise error
        for state in states:
            self.close(state)
            state.request.drafter_fault = error
            state.metrics.drafter_faults[_reason(error)] += 1
            state.asked, state.proposer, state.drafted = self._nothing, self._nothing, False

    def _ask(self, proposer: Proposer, parts: Sequence[ScheduledRequest], vocab_size: int) -> list[Draft]:
        """A draft for each part. Where the drafter fails for several at once, each is asked for alone."""
        try:
            found = proposer.drafter.propose([part.state.request for part in parts], [part.budget for part in parts])
            for draft, part in zip(found, parts, strict=True):
                require_sound(draft, part.budget, vocab_size)
            return found
        except Exception as error:
            if len(parts) == 1 or not self._lenient:
                self.failed([part.state for part in parts], error)
                return [NO_DRAFT]
            # Whatever it holds of them may be half done: it begins anew.
            for part in parts:
                self.close(part.state)
            return [self._ask(proposer, [part], vocab_size)[0] for part in parts]

    def _forced(self, state: RequestState) -> list[int]:
        """The tokens that the request's grammar forces next, as many as may be drafted."""
        grammar, proposer = state.request.grammar, state.proposer
        if grammar is None or (proposer.most == 0 and proposer.name != GRAMMAR):
            return []
        most = min(state.room, state.forcing)
        return grammar.forced(most) if most > 0 else []


def _proposer(name: str, drafter: Drafter, controller: Controller | None, most: int) -> Proposer:
    """A drafter in an engine; of a choice those among which is chosen, each with a γ of its own."""
    if isinstance(drafter, NoDrafter):
        return Proposer(name, drafter, None, 0)
    made = drafter if controller is None else paced(drafter)
    if not isinstance(made, ChosenDrafter):
        return Proposer(name, made, controller, most)
    among: dict[str, dict[str, Proposer]] = {}
    for kind in KINDS:
        among[kind] = {}
        for one, part in made.choices.items():
            own = None if controller is None else made.controllers[kind][one]
            if own is not None and controller is not None:
                own.limit = controller.limit
            among[kind][one] = _proposer(one, part, own, most)
    return Proposer(name, made, controller, most, among, made.choice)


def pruned(draft: Draft, grammar: Constraint) -> Draft:
    """A draft without the tokens that the grammar does not allow, which would be rejected anyway.

    Of a draft that was drawn at random nothing is left out but what follows such a token: `rejection` must judge every
    token that was drawn.
    """
    if draft.is_chain:
        count = grammar.valid(draft.tokens)
        if draft.probs is None:
            return draft if count == len(draft.tokens) else Draft.chain(draft.tokens[:count])
        return Draft.chain(draft.tokens[: count + 1], draft.probs[: count + 1])
    if draft.probs is not None:
        return draft
    places: dict[int, int] = {-1: -1}
    tokens: list[int] = []
    parents: list[int] = []
    for i, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent in places and grammar.allows(draft.paths[parent + 1], token):
            places[i] = len(tokens)
            tokens.append(token)
            parents.append(places[parent])
    return Draft(tokens, parents)


def _choose(state: RequestState, choice: Choice, batch: int) -> None:
    """Has the drafter draft that the choice names for this request, in a round of `batch` requests."""
    if not state.proposer.resting and choice.holds(state.number, batch):
        return
    kind = GREEDY if state.request.sampling.greedy else SAMPLED
    if isinstance(drafter := state.asked.drafter, ChosenDrafter) and drafter.copying:
        drafter.watch(state.request, state.number)
    proposer = state.asked.among[kind][choice.next(state.number, batch, kind)]
    state.ask(proposer)
    if proposer.controller is not None and choice.wakes(state.number):
        proposer.controller.look(batch)


def _budgets(proposer: Proposer, states: Sequence[RequestState], alone: bool) -> dict[int, int]:
    """Of one drafter's requests: see `Drafters.budgets`."""
    controller = proposer.controller
    proposer.resting = controller is not None and controller.resting(len(states))
    if proposer.most == 0 or proposer.resting:
        return {state.number: 0 for state in states}
    if len(states) == 1:
        # What follows, of one request, which small models feel.
        state, gamma = states[0], proposer.most
        if controller is not None:
            unread = 0 if state.drafted else len(state.request.tokens) - state.read
            gamma = controller.next_budget(1, state.room, alone, unread).budget
        return {state.number: min(gamma, state.room)}
    room = {state.number: state.room for state in states}
    if controller is None:
        return {number: min(proposer.most, most) for number, most in room.items()}
    unread = min([0 if state.drafted else len(state.request.tokens) - state.read for state in states])
    gamma, count = controller.next_budget(len(states), max(room.values()), alone, unread)
    if count >= len(states):
        return {number: min(gamma, most) for number, most in room.items()}
    # Rather one whose drafter is up to date, and that has room for the whole draft.
    first = sorted(states, key=lambda state: (not state.drafted, -min(gamma, room[state.number])))[:count]
    drafting = {state.number for state in first}
    return {number: min(gamma, most) if number in drafting else 0 for number, most in room.items()}


def _by_proposer(states: Sequence[RequestState]) -> dict[Proposer, list[RequestState]]:
    """The requests of each drafter."""
    found: dict[Proposer, list[RequestState]] = {}
    for state in states:
        found.setdefault(state.proposer, []).append(state)
    return found


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
