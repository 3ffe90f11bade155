"""Who drafts: of several drafters the one that gains the most tokens per second, for each text by itself.

A bandit over what was measured. What a round takes is the same for all texts: the target's time by its rows, which all
drafters share, so that a machine that changes its pace changes all alike, and what each one's drafting takes. What a
round gains is learned of each text, beginning with what texts gained lately. All others are looked at now and then,
in so far as looking costs little: a text that begins to repeat itself is for lookup, whoever was best before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runtime.speculative.estimates import Curve

# Kinds of texts: drafts that are right of the most probable tokens are not so of drawn ones.
KINDS = GREEDY, SAMPLED = "greedy", "sampled"
# What looks at drafters that are not the best may cost, as a share of all time, and before there is much of that, in
# rounds.
LOOKING = 0.01
CREDIT = 2.0
# Rounds of a look: the first also reads what its drafter has missed, and copies begin short. Of the first look of all,
# in which a controller begins without drafts.
_LOOK, _FIRST_LOOK = 3, 8
# A choice holds for so many rounds, and twice as long each time that it is made again; so does the pause between looks.
_HOLD, _LONGEST_HOLD = 8, 32
_PAUSE, _LONGEST_PAUSE = 8, 64
# How much a round counts in what a drafter's rounds cost, and the longest that drafting may take, in target forwards.
_COSTS, _SLOWEST = 0.03, 4.0
# What a round leaves of a text's counts before it, and of those of all texts; how many rounds the latter count for in a
# text of which nothing is known.
_FADE, _FADE_ALL, _PRIOR = 0.97, 0.98, 5.0


@dataclass
class _Gain:
    """Tokens of rounds, fading."""

    tokens: float = 0.0
    rounds: float = 0.0

    def add(self, tokens: int, fade: float) -> None:
        self.tokens, self.rounds = self.tokens * fade + tokens, self.rounds * fade + 1

    def halve(self) -> None:
        """What is to be looked at again may have changed."""
        self.tokens, self.rounds = self.tokens / 2, self.rounds / 2


@dataclass
class _Cost:
    """What a drafter's rounds are of one text: rows of the target's forward, and seconds of drafting; fading means."""

    rows: float = 0.0
    drafting: float = 0.0
    rounds: int = 0

    def add(self, rows: int, drafting: float, rest: float) -> None:
        self.rounds += 1
        rate = max(_COSTS, 1 / self.rounds)
        self.rows += rate * (rows - self.rows)
        # Where the machine was elsewhere; a chain's own times differ widely, by who of it drafts.
        self.drafting += rate * (min(drafting, _SLOWEST * rest) - self.drafting)


@dataclass
class _Usual:
    """What texts of a kind gained lately and what their rounds were, by drafter."""

    gains: dict[str, _Gain]
    costs: dict[str, _Cost]


@dataclass
class _Text:
    """What is known of one text.

    gains   by drafter.
    usual   what texts of its kind gained and took.
    chosen  who drafts, for `left` rounds more; `hold`: for how many it was chosen.
    unread  whether its drafter has to read first what others wrote.
    best    the tokens per second of who looked best, during a look at another; else 0.
    rounds  that it had.
    paused  by drafter: until which round it may not be looked at again; `pauses`: for how many.
    """

    gains: dict[str, _Gain]
    usual: "_Usual"
    chosen: str
    left: int = 0
    hold: int = _HOLD
    unread: bool = False
    best: float = 0.0
    rounds: int = 0
    paused: dict[str, int] = field(default_factory=dict)
    pauses: dict[str, int] = field(default_factory=dict)


class Choice:
    """Chooses among drafters by name; the first is where a choice begins that nothing is known of yet."""

    def __init__(self, names: Sequence[str]) -> None:
        """Raises ValueError for fewer than two names, or the same one twice."""
        if len(set(names)) != len(names) or len(names) < 2:
            raise ValueError(f"to choose takes two or more drafters of different names, not {', '.join(names)}")
        self.names = tuple(names)
        self.seconds = self.looking_seconds = 0.0
        self._usual = {
            kind: _Usual({name: _Gain() for name in names}, {name: _Cost() for name in names}) for kind in KINDS
        }
        # By the texts in a round: the seconds of one text's part of the target's forward, by its rows.
        self._target: dict[int, Curve] = {}
        self._texts: dict[int, _Text] = {}

    def looking(self, text: int) -> bool:
        """Whether the drafter that was named last for this text is looked at, rather than thought to be the best."""
        return self._texts[text].best > 0

    def timed(self, kind: str = GREEDY) -> Mapping[str, int]:
        """How many rounds of texts of this kind were timed, by drafter."""
        return {name: cost.rounds for name, cost in self._usual[kind].costs.items()}

    def next(self, text: int, batch: int, kind: str = GREEDY) -> str:
        """Who drafts for this text, which is of this kind, in a round of `batch` texts."""
        known = self._texts.get(text)
        if known is None:
            own = {name: _Gain() for name in self.names}
            known = self._texts[text] = _Text(own, self._usual[kind], self.names[0])
        elif known.left > 0:
            return known.chosen
        times = self._times(known, batch)
        rates = {name: self._tokens(known, name) / taken if taken > 0 else 0.0 for name, taken in times.items()}
        known.best = 0.0
        best = max(self.names, key=rates.__getitem__)
        look = self._look(known, best, rates, times)
        if look is not None:
            pause = known.pauses[look] = min(2 * known.pauses.get(look, _PAUSE // 2), _LONGEST_PAUSE)
            known.paused[look] = known.rounds + pause
            known.chosen, known.hold, known.best = look, _HOLD, rates[best]
            known.left = _LOOK if rates[look] > 0 else _FIRST_LOOK
            known.unread = True
            known.gains[look].halve()
            return look
        known.unread = best != known.chosen
        known.hold = min(2 * known.hold, _LONGEST_HOLD) if best == known.chosen else _HOLD
        known.chosen, known.left = best, known.hold
        known.pauses.pop(best, None)
        return best

    def observe(self, text: int, tokens: int, rows: int, drafting: float, rest: float, batch: int) -> None:
        """Learns from a text's part of a round of `batch` texts, drafted by whoever `next` named.

        tokens          that it gained.
        rows            of the target's forward.
        drafting, rest  seconds: of drafting for it, and of everything else.
        """
        known, seconds = self._texts[text], drafting + rest
        name = known.chosen
        known.left -= 1
        known.rounds += 1
        self.seconds += seconds
        if known.best > 0:
            self.looking_seconds += max(0.0, seconds - tokens / known.best)
        known.gains[name].add(tokens, _FADE)
        known.usual.gains[name].add(tokens, _FADE_ALL)
        # The first round after another drafter's is not what it takes: it has read what it missed.
        if not known.unread:
            known.usual.costs[name].add(rows, drafting, rest)
        target = self._target.get(batch)
        if target is None:
            target = self._target[batch] = Curve()
        target.add(rows, rest)
        known.unread = False

    def close(self, text: int) -> None:
        """The text has ended."""
        self._texts.pop(text, None)

    def tokens(self, text: int) -> Mapping[str, float]:
        """Tokens that a round of this text can be expected to gain, by drafter."""
        return {name: self._tokens(self._texts[text], name) for name in self.names}

    def _tokens(self, known: _Text, name: str) -> float:
        own, others = known.gains[name], known.usual.gains[name]
        usual = others.tokens / others.rounds if others.rounds else 1.0
        return (own.tokens + _PRIOR * usual) / (own.rounds + _PRIOR)

    def _times(self, known: _Text, batch: int) -> dict[str, float]:
        """What a text's part of a round takes, in seconds, by drafter; 0 where none was timed."""
        if not self._target:
            return dict.fromkeys(self.names, 0.0)
        target = self._target.get(batch) or self._target[min(self._target, key=lambda texts: abs(texts - batch))]
        found = {}
        for name in self.names:
            cost = known.usual.costs[name]
            found[name] = target.at(cost.rows) + cost.drafting if cost.rounds else 0.0
        return found

    def _look(self, known: _Text, best: str, rates: Mapping[str, float], times: Mapping[str, float]) -> str | None:
        """Who is to be looked at, if that is due and can be afforded: of those, who was waiting the longest."""
        due = [name for name in self.names if name != best and known.paused.get(name, 0) <= known.rounds]
        if not due:
            return None
        left = LOOKING * self.seconds + CREDIT * times[best] - self.looking_seconds
        for name in sorted(due, key=lambda name: known.paused.get(name, 0)):
            if rates[name] == 0:
                return name  # never timed
            lost = _LOOK * (times[name] - self._tokens(known, name) / rates[best])
            if lost <= left:
                return name
        return None
