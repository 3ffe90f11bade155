"""Who drafts: of several drafters the one that gains the most tokens per second, for each text by itself.

A bandit over what was measured. What a round takes is the same for all texts: the target's time by its rows, which all
drafters share, so that a machine that changes its pace changes all alike, and what each one's drafting takes. What a
round gains is learned of each text, beginning with what texts gained lately. All others are looked at now and then,
in so far as looking costs little. Those that copy need not draft for that: what they would have gained the text itself
shows (shadow.py), and one that begins to repeat itself is theirs at once, whoever was best before.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from runtime.speculative.by_drafter import Expected, Gain, Taken, Usual

# Kinds of texts: drafts that are right of the most probable tokens are not so of drawn ones.
KINDS = GREEDY, SAMPLED = "greedy", "sampled"
# Rounds of a look, which goes on by steps. A drafter of which fewer than some were timed is looked at for longer: its γ
# has yet to be found.
_LOOK, _FIRST_LOOK, _YOUNG, _STEP = 12, 16, 48, 4
# What another drafter must promise over the one that drafts, as a share: it has to read what it missed. And at least so
# many standard errors of both: where drafts are right for stretches, hundreds of rounds do not tell two drafters apart.
_SWITCH, _SURE = 0.03, 0.4
# The first rounds after another drafter's do not show what a drafter takes: it reads what it missed, and its weights
# have left the processor's caches.
_COLD = 2
# A choice holds for so many rounds, and twice as long each time that it is made again; so does the pause between looks.
_HOLD, _LONGEST_HOLD = 32, 64
_PAUSE, _LONGEST_PAUSE = 8, 64
# A text repeats itself where copies gain so many tokens a round; what one such round counts in that, and a draft that
# was only watched, which stands for some rounds.
_REPEATS, _COPIED, _SHADOWED = 3.0, 0.25, 0.4
# Where no copy is found for a token, none is for the next one as often as this (on the pair; 0.65 of sampled ones).
_SINGLE = 0.5
# After so many copies in a row that were wrong from the beginning it is asked whether the text repeats itself still.
_MISSED = 5
# What drafting must gain over not drafting for its drafter to be woken.
_PAYS = 1.03


@dataclass
class _Text:
    """What is known of one text.

    gains   by whether it repeats itself, and by drafter; copied: the tokens that rounds of copies gained lately.
    usual   what texts of its kind gained and took.
    chosen  who drafts, for `left` rounds more; `hold`: for how many it was chosen.
    batch   of how many texts its rounds are; kept: those since the last choice.
    watched by whether it repeated itself, and by drafter: tokens and rows of drafts that were watched since then.
    missed  the last rounds of its drafter, as far as they gained one token.
    cold    rounds until its drafter takes what it usually does.
    favourites  who was thought the best last, by whether it repeated itself.
    best    the tokens per second of who looked best, during a look at another; else 0.
    look    rounds that this look may go on; charged: the seconds of what it lost that are counted already.
    pays    whether who was chosen gains clearly more than rounds without drafts.
    rounds  that it had; unwatched: up to which one nobody is to be watched.
    paused  by drafter: until which round it may not be looked at again; `pauses`: for how many.
    """

    gains: Mapping[bool, dict[str, Gain]]
    usual: Usual
    chosen: str
    copied: float = 1.0
    favourites: dict[bool, str] = field(default_factory=dict)
    left: int = 0
    hold: int = _HOLD
    batch: int = 1
    kept: list[Taken] = field(default_factory=list)
    watched: Mapping[bool, dict[str, tuple[list[int], list[int]]]] = field(
        default_factory=lambda: {repeats: {} for repeats in (False, True)}
    )
    missed: int = 0
    cold: int = 0
    best: float = 0.0
    look: int = 0
    charged: float = 0.0
    pays: bool = False
    rounds: int = 0
    unwatched: int = 0
    paused: dict[str, int] = field(default_factory=dict)
    pauses: dict[str, int] = field(default_factory=dict)

    @property
    def repeats(self) -> bool:
        """Whether it repeats itself."""
        return self.copied >= _REPEATS

    def goes_on(self) -> bool:
        """Whether a look whose step has ended takes another one: what it loses can be afforded. Its rounds are kept."""
        if self.look <= 0 or not self.kept:
            return False
        usual, lost = self.usual, self._lost(self.kept)
        usual.looking += lost - self.charged
        self.charged = lost
        if _STEP * lost > len(self.kept) * usual.left_for_looks:
            return False
        self.left = min(_STEP, self.look)
        self.look -= self.left
        return True

    def _lost(self, rounds: Sequence[Taken]) -> float:
        """The seconds that rounds of a look lost; 0 where nobody was timed before."""
        if self.best <= 0:
            return 0.0
        return max(0.0, sum([one.seconds for one in rounds]) - sum([one.tokens for one in rounds]) / self.best)

    def take_in(self, copier: str | None) -> None:
        """Learns from the rounds that were kept, all by the same drafter, and from drafts that were watched.

        copier  who copies and was asked first in these rounds: this drafter itself, or the first one of a chain.
        """
        usual = self.usual
        for repeats, by_name in self.watched.items():
            for name, (tokens, rows) in by_name.items():
                usual.phases[repeats].gained(self.gains[repeats][name], name, tokens, sum(rows))
            by_name.clear()
        if not (rounds := self.kept):
            return
        self.kept = []
        usual.took(self.batch, rounds)
        usual.looking += self._lost(rounds) - self.charged
        self.charged = 0.0
        # Where nobody was asked γ was 0: such rounds are alike, whoever rests.
        drafted = [one for one in rounds if one.drafting > 0]
        if not drafted:
            return
        by_phase: dict[bool, list[Taken]] = {self.repeats: drafted}
        if copier is not None:
            by_phase, copied = {}, self.copied
            for one in drafted:
                by_phase.setdefault(copied >= _REPEATS, []).append(one)
                copied += _COPIED * ((one.tokens if one.number == 1 else 1) - copied)
            self.copied = copied
        for repeats, some in by_phase.items():
            own = self.gains[repeats][self.chosen]
            usual.phases[repeats].gained(
                own, self.chosen, [one.tokens for one in some], sum([one.rows for one in some])
            )
            if copier is not None and copier != self.chosen:
                self._led(copier, repeats, some)
        cost, cold = usual.costs[self.chosen], self.cold
        self.cold = max(0, cold - len(drafted))
        if shown := drafted[cold:]:
            # γ is chosen more often in a look than when the same drafter goes on.
            cost.add(shown, asking=self.best == 0)
        if cold == _COLD and self.best > 0:
            cost.read(drafted[0].drafting)

    def _led(self, copier: str, repeats: bool, rounds: Sequence[Taken]) -> None:
        """Learns what a drafter would have gained alone from the rounds of a chain that begins with it. Where it found
        nothing the next one's draft may have gained several tokens: some of them it would have gained one by one."""
        tokens, rows = [], 0
        for one in rounds:
            each = [one.tokens] if one.number == 1 else [1] * round(1 + _SINGLE * (one.tokens - 1))
            tokens += each
            rows += one.rows if one.number == 1 else len(each)
        self.usual.phases[repeats].gained(self.gains[repeats][copier], copier, tokens, rows)


class Choice:
    """Chooses among drafters by name; the first is where a choice begins that nothing is known of yet."""

    def __init__(
        self, names: Sequence[str], copying: Collection[str] = (), leading: Mapping[str, str] | None = None
    ) -> None:
        """copying: those of whom `shadowed` tells what they would have gained; once timed they are not looked at.
        leading: of chains that begin with one of these whom they begin with; their rounds tell it.

        Raises ValueError for fewer than two names, or the same one twice.
        """
        if len(set(names)) != len(names) or len(names) < 2:
            raise ValueError(f"to choose takes two or more drafters of different names, not {', '.join(names)}")
        self.names, self._copying = tuple(names), frozenset(copying)
        self._copiers = {name: name for name in copying} | {k: v for k, v in (leading or {}).items() if v in copying}
        # Who, while they draft, leave nobody to be watched; with two that copy there is no such drafter.
        self._alone = frozenset(self._copiers) if len(copying) == 1 else frozenset[str]()
        self._usual = {kind: Usual.of(names, copying) for kind in KINDS}
        self._texts: dict[int, _Text] = {}

    def drafts(self, text: int) -> str | None:
        """Who drafts for this text, until others are chosen; None: nobody was chosen yet."""
        known = self._texts.get(text)
        return None if known is None else known.chosen

    def copier(self, name: str) -> str | None:
        """Whose copies the rounds of this drafter tell: its own, or those of the first one of a chain."""
        return self._copiers.get(name)

    def holds(self, text: int, batch: int) -> bool:
        """Whether whoever drafts for this text goes on in a round of `batch` texts, and nobody has to be watched: most
        rounds are such, and small models feel what asking takes."""
        known = self._texts.get(text)
        if known is None or known.left <= 0 or batch != known.batch:
            return False
        return known.chosen in self._alone or known.rounds < known.unwatched

    def rounds(self, text: int) -> int:
        """How many rounds this text had."""
        return self._texts[text].rounds

    def unwatched(self, text: int, until: int) -> None:
        """Nobody has to be watched before the text has had so many rounds."""
        self._texts[text].unwatched = until

    def wakes(self, text: int) -> bool:
        """Whether the drafter that was named last for this text is to draft even if its γ is 0: it is looked at, or has
        gained clearly more than rounds without drafts do."""
        known = self._texts[text]
        return known.best > 0 or known.pays

    def timed(self, kind: str = GREEDY) -> Mapping[str, int]:
        """How many rounds of texts of this kind were timed, by drafter."""
        return {name: cost.rounds for name, cost in self._usual[kind].costs.items()}

    def next(self, text: int, batch: int, kind: str = GREEDY) -> str:
        """Who drafts for this text, which is of this kind, in a round of `batch` texts."""
        known = self._texts.get(text)
        if known is None:
            own = {repeats: {name: Gain() for name in self.names} for repeats in (False, True)}
            known = self._texts[text] = _Text(own, self._usual[kind], self.names[0])
        elif batch == known.batch and (known.left > 0 or known.goes_on()):
            return known.chosen
        known.take_in(self._copiers.get(known.chosen))
        known.batch = batch
        if known.left > 0:
            return known.chosen
        known.pays, known.best = False, 0.0
        repeats = known.repeats
        gained, usual, phase = known.gains[repeats], known.usual, known.usual.phases[repeats]
        fresh, before = repeats not in known.favourites, known.favourites.get(repeats, phase.favourite)
        if fresh:
            found = usual.expected({}, repeats, batch)
            before = phase.favourite = _best(found, before)
        if not fresh or any(gain.rounds for gain in gained.values()):
            found = usual.expected(gained, repeats, batch)
        best = known.favourites[repeats] = _best(found, before)
        look = self._look(known, best, found)
        if look is not None:
            pause = known.pauses[look] = min(2 * known.pauses.get(look, _PAUSE // 2), _LONGEST_PAUSE)
            known.paused[look] = known.rounds + pause
            known.chosen, known.hold, known.best = look, _HOLD, found[best].rate
            known.left, known.look, known.cold = _STEP, self._rounds_of(known, look) - _STEP, _COLD
            known.missed = 0
            known.gains[repeats][look].halve()
            return look
        known.look = 0
        if best != known.chosen:
            known.cold, known.missed = _COLD, 0
        known.pays = 0 < _PAYS < found[best].rate * usual.forward(batch).at(1)
        known.hold = min(2 * known.hold, _LONGEST_HOLD) if best == known.chosen else _HOLD
        # As long as there is somebody of whom nothing is known no choice holds for longer than a look is put off.
        untimed = not all(cost.rounds for cost in usual.costs.values())
        known.chosen, known.left = best, min(known.hold, _PAUSE) if untimed else known.hold
        known.pauses.pop(best, None)
        return best

    def observe(self, text: int, taken: Taken) -> None:
        """Learns from a text's part of a round, drafted by whoever `next` named."""
        known = self._texts[text]
        known.left -= 1
        known.rounds += 1
        known.kept.append(taken)
        known.missed = known.missed + 1 if taken.tokens == 1 else 0
        if known.missed >= _MISSED and known.repeats and known.chosen in self._copying:
            known.left = 0

    def shadowed(self, text: int, name: str, tokens: int, rows: int, passed: int = 0) -> None:
        """Learns that a round of so many rows would have gained so many tokens, had this drafter drafted, after so many
        `passed` rounds that were not watched, as one before them had gained one token."""
        known = self._texts[text]
        if name == self._copiers.get(known.chosen):
            return
        if passed > 0:
            seen = known.watched[known.repeats].setdefault(name, ([], []))
            seen[0].extend([1] * passed)
            seen[1].extend([min(rows, 2)] * passed)
        copied = known.copied + _SHADOWED * (tokens - known.copied)
        repeats, before = copied >= _REPEATS, known.repeats
        if repeats == before:
            seen = known.watched[repeats].setdefault(name, ([], []))
            seen[0].append(tokens)
            seen[1].append(rows)
        else:
            # It counts for what the text was thought to be before it, and for others alone: what tells that a text
            # repeats itself would always promise that copies will be right. Only the first of all does.
            phases = known.usual.phases
            first = repeats and not phases[True].gains[name].rounds
            phases[before or first].gained(Gain(), name, (tokens,), rows)
            known.take_in(self._copiers.get(known.chosen))
            known.left = known.look = 0
            # Who is the best now is to draft now.
            known.paused = {one: max(known.paused.get(one, 0), known.rounds + _PAUSE) for one in self.names}
        known.copied = copied

    def close(self, text: int) -> None:
        """The text has ended."""
        known = self._texts.pop(text, None)
        if known is not None:
            known.take_in(self._copiers.get(known.chosen))
            for repeats, phase in known.usual.phases.items():
                phase.end(known.gains[repeats])

    def _rounds_of(self, known: _Text, name: str) -> int:
        """A look at a drafter."""
        return _LOOK if known.usual.costs[name].rounds >= _YOUNG else _FIRST_LOOK

    def _look(self, known: _Text, best: str, found: Mapping[str, Expected]) -> str | None:
        """Who is to be looked at, if that is due and can be afforded: of those who was waiting the longest, and before
        them who was timed too seldom to tell."""
        due = [
            name
            for name in self.names
            if name != best
            and known.paused.get(name, 0) <= known.rounds
            and (found[name].rate == 0 or name not in self._copying)
        ]
        if not due:
            return None
        usual = known.usual
        left = usual.left_for_looks
        for name in sorted(due, key=lambda name: (min(usual.costs[name].rounds, _YOUNG), known.paused.get(name, 0))):
            one = found[name]
            if one.rate == 0:
                return name  # never timed
            lost = one.seconds - one.tokens / found[best].rate if found[best].rate > 0 else 0.0
            lost = usual.costs[name].reading + self._rounds_of(known, name) * lost
            if lost <= left:
                return name
            if usual.costs[name].rounds < _YOUNG:
                return None  # it is saved for
        return None


def _best(found: Mapping[str, Expected], before: str) -> str:
    """Who gains the most per second; who was thought so `before`, unless another clearly gains more."""
    best = max(found, key=lambda name: found[name].rate)
    if before not in found or best == before:
        return best
    new, old = found[best], found[before]
    return best if new.rate > (1 + max(_SWITCH, _SURE * math.hypot(new.doubt, old.doubt))) * old.rate else before
