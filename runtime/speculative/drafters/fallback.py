"""Several drafters as one: the next is asked where the one before it finds nothing, or who gains most is asked."""

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import UserError
from runtime.speculative.choice import KINDS, Choice
from runtime.speculative.draft import CopyingDrafter, Draft, Drafter, Outcome, Request, StateReader, TakenStates
from runtime.speculative.draft_length import Controller
from runtime.speculative.shadow import Shadow


class ChainedDrafter:
    """For each request the draft of the first drafter that proposes anything: lookup, say, and otherwise a model.

    A drafter is asked only for the requests that those before it left empty, so a model costs nothing where lookup
    finds something. Which drafter it was may not depend on chance, which holds for all of ours.

    each    the drafters themselves, also those of chains among them, each once: chains may share some.
    asked   how many of them the last drafts were asked of.
    limits  by number (1, …) the most tokens of a draft by some of them, which whoever chooses γ keeps up to date.
    """

    _most_readers = 1

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        """Raises ValueError without drafters; UserError for two that read hidden states."""
        if not drafters:
            raise ValueError("a chain needs at least one drafter")
        self.drafters = tuple(drafters)
        found = [one for part in drafters for one in (part.each if isinstance(part, ChainedDrafter) else (part,))]
        self.each: tuple[Drafter, ...] = tuple(dict.fromkeys(found))
        self.name, self.asked = "+".join(drafter.name for drafter in drafters), 1
        self.limits: Mapping[int, int] = {}
        self._readers = [drafter for drafter in self.each if isinstance(drafter, StateReader) and drafter.taps]
        if len(self._readers) > self._most_readers:
            raise UserError(f"{self.name}: at most one drafter of a chain can read the target's hidden states")

    @property
    def taps(self) -> tuple[int, ...]:
        """See StateReader."""
        return self._readers[0].taps if self._readers else ()

    def read(self, taken: Sequence[TakenStates]) -> None:
        """See StateReader."""
        for drafter in self._readers:
            drafter.read(taken)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """One draft per request, an empty one where no drafter proposes anything."""
        drafts = [Draft() for _ in requests]
        for number, drafter in enumerate(self.drafters, 1):
            most, left = self.limits.get(number), [i for i, draft in enumerate(drafts) if not draft.tokens]
            own = budgets if most is None else [min(budget, most) for budget in budgets]
            left = [i for i in left if own[i] > 0]
            if not left:
                continue
            self.asked = number
            found = drafter.propose([requests[i] for i in left], [own[i] for i in left])
            for i, draft in zip(left, found, strict=True):
                drafts[i] = draft if number == 1 else draft.numbered(number)
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for drafter in self.each:
            drafter.observe(outcomes)

    def close(self, request: Request) -> None:
        for drafter in self.each:
            drafter.close(request)


class ChosenDrafter(ChainedDrafter):
    """Drafters of which an engine asks, round by round and for each text, the one that gains most.

    Where nobody measures what they gain it is a chain of them. What is learned of them stays from engine to engine.

    choice       who chooses.
    controllers  of each one's γ, by the kind of a text (choice.KINDS) and its name, where γ is not fixed.
    copying      those that only copy, which are watched while others draft.
    """

    _most_readers = 99

    def __init__(self, drafters: Sequence[Drafter], of: "ChosenDrafter | None" = None) -> None:
        """of: one whose drafters these are in another form; what it has learned, and who copies, are shared with it.

        Raises ValueError for fewer than two drafters, or two of a name.
        """
        super().__init__(drafters)
        names = [drafter.name for drafter in drafters]
        self.choices = {drafter.name: drafter for drafter in drafters}
        self.copying: Mapping[str, CopyingDrafter[Any]]
        self.choice: Choice
        self.controllers: Mapping[str, Mapping[str, Controller]]
        if of is not None:
            self.copying, self.choice, self.controllers = of.copying, of.choice, of.controllers
        else:
            self.copying = {one.name: one for one in drafters if isinstance(one, CopyingDrafter)}
            leading = {one.name: one.drafters[0].name for one in drafters if isinstance(one, ChainedDrafter)}
            self.choice = Choice(names, self.copying, leading)
            self.controllers = {kind: {name: Controller() for name in names} for kind in KINDS}
        self.name = ",".join(self.choices)
        self._shadows: dict[int, dict[str, Shadow]] = {}

    def watch(self, request: Request, text: int) -> None:
        """Before a round of this text, by the number that the choice knows it by: tells what those who do not draft for
        it would have gained."""
        if (drafting := self.choice.drafts(text)) is None:
            return
        shadows = self._shadows.get(request.id)
        if shadows is None:
            shadows = self._shadows[request.id] = {name: Shadow() for name in self.copying}
        copier = self.choice.copier(drafting)
        if copier is not None:
            shadows[copier].forget()
            if len(shadows) == 1:
                return
        number, due = self.choice.rounds(text), []
        for name, shadow in shadows.items():
            if name == copier:
                continue
            if (right := shadow.round(request, self.copying[name], number)) is not None:
                self.choice.shadowed(text, name, 1 + right, shadow.rows, shadow.passed)
            due.append(shadow.due)
        self.choice.unwatched(text, min(due))

    def close(self, request: Request) -> None:
        """See Drafter."""
        self._shadows.pop(request.id, None)
        super().close(request)

    @property
    def taps(self) -> tuple[int, ...]:
        """Of all drafters: see StateReader."""
        return tuple(sorted({tap for reader in self._readers for tap in reader.taps}))

    def read(self, taken: Sequence[TakenStates]) -> None:
        """See StateReader."""
        for reader in self._readers:
            reader.read([part.of(self.taps, reader.taps) for part in taken])
