"""What a controller has measured of its drafter, or knows from elsewhere: what rounds take, and what drafts gain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from runtime.speculative.estimates import Chain, Curve, Lengths, Tree

NOTHING_KNOWN: Mapping[int, float] = MappingProxyType({})
# Times known before are in forwards of one row: so many rounds tell how long that is.
_UNITS = 3
# How much a forward counts in how slow the machine is now, how much slower or faster one may look, and how often its
# number of rows must have been seen to tell.
_PACE, _OFF, _SEEN = 0.2, 1.3, 3
# What a forward leaves of the logarithm of the pace. Times are kept at a pace, and the pace follows from such times:
# nothing else keeps both from drifting, and rows that are seldom seen would come to look a thousand times as dear.
_STAYS = 0.98
# What a forward takes at least, in seconds: a clock that counts in steps may say that it took no time.
_LEAST = 1e-9
# What a round leaves of how often a chain of drafters came to each of them.
_FADE_ASKED = 0.98
# Where no draft can pay, rounds of at most so many drafted tokens are worked out: that takes time, too.
_HOPELESS = 4


class Drafted(NamedTuple):
    """One request's draft in a round: its tokens, those accepted, whether it was a chain, and which ones they were.

    number  of a chain of drafters which one made it: 1, 2, …
    """

    drafted: int
    accepted: int
    chain: bool = True
    path: Sequence[int] = ()
    number: int = 1


class Round(NamedTuple):
    """What one round was and took: `batch` requests, a draft of at most `budget` tokens for some of them.

    drafts  one for each request that was drafted for.
    width   rows of the target's forward.
    unread  tokens that the drafter had to read first of requests that did not draft in the round before.
    asked   of a chain of drafters how many had to be asked.
    asking  seconds that choosing γ took.
    """

    batch: int
    budget: int
    drafts: Sequence[Drafted]
    width: int
    draft_seconds: float
    target_seconds: float
    unread: int = 0
    asked: int = 1
    asking: float = 0.0


@dataclass(frozen=True)
class Prior:
    """What is known of a drafter before its first round, as a run's report has it.

    accepted  share of its drafts of which at least 1, 2, … tokens were accepted.
    length    γ of these drafts; drafting: what one took, in forwards of one row.
    widths    what a forward takes by its rows, in forwards of one row.

    Raises ValueError for a length below 1, no acceptance, shares outside 0..1, and times that are not above 0.
    """

    accepted: tuple[float, ...]
    length: int
    drafting: float
    widths: Mapping[int, float]

    def __post_init__(self) -> None:
        shares = bool(self.accepted) and all(0 <= share <= 1 for share in self.accepted)
        if not shares or self.length < 1 or 1 not in self.widths or min(self.drafting, *self.widths.values()) <= 0:
            raise ValueError(f"no drafter can have such acceptance and times: {self}")


class Times:
    """Seconds of the target's forward by its rows, and of drafting by the requests drafted for and their budget.

    Where lookup finds nothing a model is asked, which takes a hundred times as long: drafting is known apart for rounds
    in which one, two, … of a chain of drafters were asked, and takes what these take as often as they are seen.

    A machine changes its pace, and what was seen while it was slow must not look dearer than what was seen since. So
    times are kept in seconds of a machine of one pace; how slow it is now follows from forwards that were seen before.

    widths  what a forward takes by its rows, in forwards of one row, where it was measured: rather than a prior's.
    limits  by the drafters asked, the most tokens of a draft, whatever its budget; who knows them keeps them here.
    """

    def __init__(self, prior: Prior | None = None, widths: Mapping[int, float] = NOTHING_KNOWN) -> None:
        self.limits: dict[int, int] = {}
        self._target = Curve.of(widths or (prior.widths if prior is not None else {}))
        # By the drafters asked, and then by the requests drafted for; how often so many were asked.
        self._draft: dict[int, dict[int, Curve]] = {}
        self._asked: dict[int, float] = {}
        self._begun = {1}  # drafters asked of whose drafts the first is over
        if prior is not None:
            self._draft, self._asked = {1: {1: Curve.of({0: 0.0, prior.length: prior.drafting})}}, {1: 1.0}
        # With times known before: how long a forward of one row seems to take, by each of the first rounds; the middle
        # one counts.
        self._units: list[float] = []
        self._unit = 1.0
        self._begins = bool(self._target.known)
        self._pace = 1.0  # what takes a second at the pace of the times that are kept

    @property
    def widest(self) -> int:
        """The most rows whose time is known; 0 where none is."""
        return max(self._target.known, default=0)

    def target(self, width: float) -> float:
        """Of a forward; 0 where nothing is known."""
        return self._pace * self._target.at(width)

    def targets(self, widths: Sequence[float]) -> list[float]:
        """Of forwards of so many rows, which rise."""
        return [self._pace * seconds for seconds in self._target.along(widths)]

    def drafting(self, requests: int, budget: int, asked: int | None = None) -> float:
        """Of drafts of at most so many tokens for so many requests, of so many drafters asked (None: as it is seen)."""
        if asked in self._draft:
            return self._pace * _nearest(self._draft[asked], requests).at(self._limited(asked, budget))
        return self.draftings(requests, budget)[budget]

    def timed(self, asked: int) -> bool:
        """Whether drafts of so many drafters asked have been timed."""
        return asked in self._draft

    def begun(self, asked: int) -> bool:
        """Whether the first draft of so many drafters asked, which may have had to read the text, is over."""
        return asked in self._begun

    def unlimited(self, asked: int, most: int) -> list[float]:
        """Of drafts of at most 0, 1, … `most` tokens for one request, of so many drafters asked, without a limit."""
        return [self._pace * seconds for seconds in _nearest(self._draft[asked], 1).along(range(most + 1))]

    def _limited(self, asked: int, budget: int) -> int:
        return min(budget, self.limits.get(asked, budget))

    def draftings(self, requests: int, most: int) -> list[float]:
        """The same for drafts of at most 0, 1, … `most` tokens; 0 where nothing is known."""
        found, all_asked = [0.0] * (most + 1), sum(self._asked.values())
        for asked, by_requests in self._draft.items():
            share = self._pace * self._asked[asked] / all_asked
            budgets = range(self._limited(asked, most) + 1)
            took = _nearest(by_requests, requests).along(budgets)
            for budget in range(most + 1):
                found[budget] += share * took[min(budget, budgets[-1])]
        return found

    def drafts(self, budget: int) -> int:
        """How often drafts of this budget were timed."""
        curves = (curve for by_requests in self._draft.values() for curve in by_requests.values())
        return max((curve.counts.get(budget, 0) for curve in curves), default=0)

    def add(self, rounds: Sequence[Round]) -> None:
        """Takes in rounds with drafts."""
        targets: dict[int, list[float]] = {}
        drafting: dict[tuple[int, int, int], list[float]] = {}
        for one in rounds:
            targets.setdefault(one.width, []).append(one.target_seconds)
            if not one.unread:
                drafting.setdefault((len(one.drafts), one.budget, one.asked), []).append(one.draft_seconds)
        for (requests, budget, asked), took in drafting.items():
            self.add_drafting(requests, budget, *took, asked=asked)
        for width, took in targets.items():
            self.add_targets(width, took)

    def add_targets(self, width: int, seconds: Sequence[float]) -> None:
        """Takes in forwards of the same number of rows, one after the other."""
        if self._begins:
            for one in seconds:
                self.add_target(width, one)
            return
        others = sorted(max(one, _LEAST) for one in seconds)
        middle = others.pop(len(others) // 2)
        self.add_target(width, middle, len(seconds))  # the pace is what the middle one says
        self._target.add(width, *[one / self._pace for one in others])

    def add_target(self, width: int, seconds: float, forwards: int = 1) -> None:
        """Takes in a forward, or what each of so many took."""
        seconds = max(seconds, _LEAST)
        if self._begins:
            self._measure(seconds * self._unit / self._target.at(width))
        elif self._target.counts.get(width, 0) >= _SEEN and (usual := self._target.middle(width)) > 0:
            # One alone may be one in which the machine was elsewhere.
            most = _OFF ** min(forwards, 3)
            slower = seconds / (self._pace * usual)
            self._pace **= _STAYS**forwards
            self._pace *= min(max(slower, 1 / most), most) ** (1 - (1 - _PACE) ** forwards)
        self._target.add(width, seconds / self._pace)

    def add_drafting(self, requests: int, budget: int, *seconds: float, asked: int = 1) -> None:
        """Takes in drafts, each of so many seconds; of a chain's later drafter not the first one, for which it may have
        read the text."""
        if not self.begun(asked):
            self._begun.add(asked)
            seconds = seconds[1:]
        if not seconds:
            return
        for known in self._asked:
            self._asked[known] *= _FADE_ASKED ** len(seconds)
        self._asked[asked] = self._asked.get(asked, 0.0) + len(seconds)
        by_requests, budget = self._draft.setdefault(asked, {}), self._limited(asked, budget)
        if requests not in by_requests:
            by_requests[requests] = Curve.of({0: 0.0})
        by_requests[requests].add(budget, *[one / self._pace for one in seconds])

    def _measure(self, unit: float) -> None:
        """What was known before becomes seconds."""
        self._units.append(unit)
        before, self._unit = self._unit, sorted(self._units)[(len(self._units) - 1) // 2]
        for curve in (self._target, *(one for by_requests in self._draft.values() for one in by_requests.values())):
            curve.scale(self._unit / before)
        self._begins = len(self._units) < _UNITS


def _nearest(by_requests: Mapping[int, Curve], requests: int) -> Curve:
    """Unknown numbers take what the nearest known one takes: a draft model reads its weights once for all."""
    if requests in by_requests:
        return by_requests[requests]
    return by_requests[min(by_requests, key=lambda known: abs(known - requests))]


class Gains:
    """Accepted tokens of chains by depth, or of trees by their nodes, once there was any tree; and drafts' lengths."""

    def __init__(self, prior: Prior | None = None) -> None:
        self._chain, self._tree, self._lengths, self._trees = Chain(), Tree(), Lengths(), False
        if prior is not None:
            self._chain.begin(prior.accepted)
            self._tree.begin(prior.length, sum(prior.accepted))
            self._lengths.begin(len(prior.accepted))

    def add(self, budget: int, drafts: Sequence[Drafted], rounds: int = 1) -> None:
        """Takes in the drafts of at most `budget` tokens of so many rounds."""
        for counts in (self._chain, self._tree, self._lengths):
            counts.fade(rounds)
        self._trees = self._trees or False in [draft.chain for draft in drafts]
        self._lengths.add(budget, *[draft.drafted for draft in drafts])
        if self._trees:
            self._tree.add(budget, *[range(draft.accepted) if draft.chain else draft.path for draft in drafts])
        else:
            self._chain.add(budget, *[draft.accepted for draft in drafts])

    def tokens(self, most: int) -> list[float]:
        """Accepted tokens that can be expected for γ = 0, 1, … `most`."""
        return self._tree.tokens(most) if self._trees else self._chain.tokens(most)

    def shares(self, most: int) -> list[float]:
        """Of drafts of at most `most` tokens those that have a first, a second, … one."""
        return self._lengths.shares(most)

    def lengths(self, most: int) -> list[float]:
        """Drafted tokens that can be expected for γ = 0, 1, … `most`."""
        return [*accumulate(self.shares(most), initial=0.0)]


def round_rates(times: Times, gains: Gains, batch: int, most: int) -> list[float]:
    """Tokens per second that a round of γ = 0, 1, … `most` for all of `batch` requests can be expected to gain.

    0 for one whose forward is more than twice as wide as any before: what it takes is found out step by step. Where
    drafting one token takes longer than all that drafts gain is worth, only short drafts are worked out.
    """
    tokens = gains.tokens(most)
    if most > _HOPELESS and tokens[most] * times.target(batch) < times.drafting(batch, 1):
        most, tokens = _HOPELESS, tokens[: _HOPELESS + 1]
    shares, drafting = gains.shares(most), times.draftings(batch, most)
    widths = [batch * (1 + length) for length in accumulate(shares, initial=0.0)]
    if batch > 1:
        targets = times.targets(widths)
    else:
        # Drafts differ in length, and a row more may take more time than the one before it: the mean of what they take
        # is not what their mean takes.
        by_rows = times.targets(range(1, most + 2))
        steps = (share * (more - less) for share, less, more in zip(shares, by_rows, by_rows[1:], strict=False))
        targets = [*accumulate(steps, initial=by_rows[0])]
    widest = 2 * (times.widest or batch)
    return [
        0.0
        if budget and widths[budget] > widest
        else batch * (1 + gained) / max(targets[budget] + drafting[budget], 1e-9)
        for budget, gained in enumerate(tokens)
    ]


def rates_of_one(times: Times, gains: Gains, batch: int, most: int) -> list[float]:
    """Tokens per second of a round of `batch` requests of which one drafts at most 0, 1, … `most` tokens."""
    tokens, lengths = gains.tokens(most), gains.lengths(most)
    return [(batch + tokens[n]) / (times.target(batch + lengths[n]) + times.drafting(1, n)) for n in range(most + 1)]
