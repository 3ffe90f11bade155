"""What is known of several drafters beside each other: tokens and rows of their rounds, and what drafting takes.

All fades, so that what was seen lately counts more.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.speculative.estimates import Curve

# What a round leaves of a text's counts before it, and of those of all texts.
_FADE, _FADE_ALL = 0.97, 0.995
# How many rounds the latter count for in a text, at first and at least, and at most: the more, the less texts differ.
_PRIOR, _MOST_PRIOR = 5.0, 40.0
# A text that is off what is usual by so many standard errors is of another kind.
_OTHER = 3.0
# How much a text counts in how texts differ, a look in what looks take, and how many of a text's rounds it takes to
# tell.
_TEXT, _TELLING = 0.1, 6.0
# How much a round counts in what drafting takes, and the longest that it may take, in target forwards.
_COSTS, _SLOWEST = 0.03, 4.0
# So many rounds change what the target is known to take: a curve that has changed is made up anew where it is read.
_TOGETHER = 48


# How many rounds what texts gain that do not repeat themselves counts for where one does.
_OTHERS = 20.0
# What looks at drafters that are not the best may cost: a share of all time, and so many rounds each time that there
# are twice as many rounds, from so many on.
LOOKING, _CREDIT, _ROUNDS = 0.004, 2.0, 32


class Taken(NamedTuple):
    """One text's part of a round.

    tokens  that it gained; rows: of the target's forward.
    drafting, rest, asking  seconds: of drafting for it (0: nobody was asked to), of the forward and what comes after
                            it, and of choosing γ.
    number  of a chain of drafters which one drafted: 1, 2, …
    """

    tokens: int
    rows: int
    drafting: float
    rest: float
    asking: float = 0.0
    number: int = 1

    @property
    def seconds(self) -> float:
        """All that it took."""
        return self.drafting + self.rest + self.asking


class Expected(NamedTuple):
    """Tokens and seconds of a round, the latter 0 where none was timed; and how far off the tokens may be: the standard
    error, as a share of them."""

    tokens: float
    seconds: float
    doubt: float

    @property
    def rate(self) -> float:
        """Tokens per second; 0 where none was timed."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def _first(rounds: int) -> float:
    """What the last of so many rounds counts in a mean in which each counts as much as its number: a γ that is yet to
    be found makes the first ones worse."""
    return 2 / (rounds + 1)


@dataclass
class Gain:
    """Tokens and rows of rounds, fading."""

    tokens: float = 0.0
    rows: float = 0.0
    rounds: float = 0.0

    def add(self, tokens: int, rows: int, rounds: int, fade: float) -> None:
        """Takes in so many rounds."""
        left = fade**rounds
        self.tokens, self.rows = self.tokens * left + tokens, self.rows * left + rows
        self.rounds = self.rounds * left + rounds

    def halve(self) -> None:
        """What is to be looked at again may have changed."""
        self.tokens, self.rows, self.rounds = self.tokens / 2, self.rows / 2, self.rounds / 2


@dataclass
class Cost:
    """Seconds of drafting for one text in a round, and of reading what others wrote before a look; fading means."""

    drafting: float = 0.0
    rounds: int = 0
    reading: float = 0.0
    looks: int = 0

    def add(self, rounds: Sequence[Taken], asking: bool) -> None:
        """Takes in rounds; asking: with what choosing γ took."""
        self.rounds += len(rounds)
        # Where the machine was elsewhere; a chain's own times differ widely, by who of it drafts.
        seconds = sum([min(one.drafting + one.asking * asking, _SLOWEST * one.rest) for one in rounds]) / len(rounds)
        rate = max(1 - (1 - _COSTS) ** len(rounds), min(1.0, len(rounds) * _first(self.rounds)))
        self.drafting += rate * (seconds - self.drafting)

    def read(self, drafting: float) -> None:
        """Takes in the first round of a look."""
        self.looks += 1
        self.reading += max(_TEXT, _first(self.looks)) * (max(0.0, drafting - self.drafting) - self.reading)


@dataclass
class _Spread:
    """How much the tokens of a drafter's rounds differ within texts, and the means of texts from each other: variances.

    What texts gained on average counts in each for as many rounds as leave both equally in doubt, the first over the
    second (Efron and Morris 1975, "Data analysis using Stein's estimator and its generalizations").
    """

    within: float = 0.0
    between: float = 0.0
    rounds: int = 0
    texts: int = 0

    def add(self, tokens: Sequence[int], usual: float) -> None:
        """Takes in rounds of so many tokens, where so many are usual."""
        self.rounds += len(tokens)
        found = sum([(one - usual) ** 2 for one in tokens]) / len(tokens)
        self.within += min(1.0, len(tokens) * max(1 - _FADE_ALL, 1 / self.rounds)) * (found - self.within)

    def end(self, own: Gain, usual: float) -> None:
        """Takes in a text that has ended."""
        if own.rounds >= _TELLING:
            self.texts += 1
            found = (own.tokens / own.rounds - usual) ** 2 - self.within / own.rounds
            self.between += max(_TEXT, 1 / self.texts) * (found - self.between)

    def prior(self, own: Gain, usual: float) -> float:
        """Rounds that what is usual counts for in a text that has gained so much: fewer, the further it is from it."""
        rounds = _PRIOR
        if self.texts >= 1 / _TEXT:
            rounds = min(max(self.within / max(self.between, 1e-9), _PRIOR), _MOST_PRIOR)
        if own.rounds == 0 or self.within == 0:
            return rounds
        off = (own.tokens / own.rounds - usual) ** 2 * own.rounds / self.within
        return rounds * max(0.0, 1 - off / _OTHER**2)


@dataclass
class Phase:
    """What was gained by drafter while texts repeated themselves, or while they did not, which no mean of both tells.

    favourite  who is the best where nothing more is known; "": nobody yet.
    """

    gains: dict[str, Gain]
    spreads: dict[str, _Spread]
    favourite: str = ""

    def of_round(self, name: str) -> tuple[float, float]:
        """Tokens and rows of a round of this drafter."""
        gain = self.gains[name]
        return (gain.tokens / gain.rounds, gain.rows / gain.rounds) if gain.rounds else (1.0, 1.0)

    def gained(self, own: Gain, name: str, tokens: Sequence[int], rows: int) -> None:
        """Takes in rounds of this drafter, of so many rows together, of a text whose `own` counts are told as well."""
        spread, count = self.spreads[name], len(tokens)
        spread.add(tokens, self.of_round(name)[0])
        self.gains[name].add(sum(tokens), rows, count, min(_FADE_ALL, 1 - _first(spread.rounds)))
        own.add(sum(tokens), rows, count, _FADE)

    def end(self, own: Mapping[str, Gain]) -> None:
        """A text has ended."""
        for name, gain in own.items():
            self.spreads[name].end(gain, self.of_round(name)[0])


@dataclass
class Usual:
    """What texts of a kind gained lately and what their rounds were, by drafter.

    phases            by whether a text repeats itself.
    rounds, seconds   all; looking: seconds that looking has cost of them.
    target            by the texts in a round: the seconds of one text's part of the target's forward, by its rows;
                      drawing a token takes longer than finding the most probable one.
    copying           those of whom what texts gain while they do not repeat themselves tells nothing of when they do.
    later             rounds by the texts in them that are not in there yet: some are taken in together.
    """

    phases: Mapping[bool, Phase]
    costs: dict[str, Cost]
    target: dict[int, Curve] = field(default_factory=dict)
    later: dict[int, list[Taken]] = field(default_factory=dict)
    rounds: int = 0
    seconds: float = 0.0
    looking: float = 0.0
    copying: Collection[str] = ()

    @staticmethod
    def of(names: Sequence[str], copying: Collection[str] = ()) -> "Usual":
        """Of which nothing is known."""
        phases = [Phase({name: Gain() for name in names}, {name: _Spread() for name in names}) for _ in range(2)]
        return Usual({False: phases[0], True: phases[1]}, {name: Cost() for name in names}, copying=copying)

    def forward(self, batch: int) -> Curve:
        """One text's part of the forward for so many; of numbers that never were that of the nearest one."""
        if not self.target:
            return Curve()
        return self.target.get(batch) or self.target[min(self.target, key=lambda texts: abs(texts - batch))]

    def took(self, batch: int, rounds: Sequence[Taken]) -> None:
        """Takes in rounds of a text, of so many texts each."""
        self.rounds += len(rounds)
        # As columns: texts of small models feel what a sum of properties takes.
        _, _, drafting, rest, asking, _ = zip(*rounds, strict=True)
        self.seconds += sum(drafting) + sum(rest) + sum(asking)
        later = self.later.setdefault(batch, [])
        later += rounds
        curve = self.target.get(batch)
        if curve is None:
            curve = self.target[batch] = Curve()
        elif len(later) < _TOGETHER:
            return
        by_rows: dict[int, list[float]] = {}
        for one in later:
            by_rows.setdefault(one.rows, []).append(one.rest)
        later.clear()
        for rows, seconds in by_rows.items():
            curve.add(rows, *seconds)

    @property
    def left_for_looks(self) -> float:
        """Seconds that looks may still cost."""
        rounds = _CREDIT * math.log2(2 + self.rounds / _ROUNDS) / max(self.rounds, 1)
        return (LOOKING + rounds) * self.seconds - self.looking

    def expected(self, own: Mapping[str, Gain], repeats: bool, batch: int) -> dict[str, Expected]:
        """By drafter, what a round can be expected to be of a text that has gained so much, or, if nothing is known of
        one, of all; in a forward for so many texts. repeats: whether it repeats itself."""
        found, target = {}, self.forward(batch)
        for name, cost in self.costs.items():
            phase = self.phases[repeats if self.phases[repeats].gains[name].rounds else not repeats]
            (tokens, rows), spread = phase.of_round(name), phase.spreads[name]
            rounds, others = phase.gains[name].rounds, self.phases[False].gains[name].rounds
            if repeats and others and name not in self.copying:
                # Few rounds are of texts that repeat themselves, and most drafters care little whether they do.
                share = _OTHERS / (_OTHERS + rounds)
                mixed = zip((tokens, rows), self.phases[False].of_round(name), strict=True)
                tokens, rows = (here + share * (elsewhere - here) for here, elsewhere in mixed)
            if name in own:
                gain = own[name]
                prior = spread.prior(gain, tokens)
                rounds = gain.rounds + prior
                tokens, rows = (gain.tokens + prior * tokens) / rounds, (gain.rows + prior * rows) / rounds
            doubt = (spread.within / rounds) ** 0.5 / tokens if rounds else 0.0
            found[name] = Expected(tokens, target.at(rows) + cost.drafting if cost.rounds else 0.0, doubt)
        return found
