"""What a controller has measured of its drafter, or knows from elsewhere: what rounds take, and what drafts gain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from runtime.speculative.estimates import Chain, Curve, Tree

NOTHING_KNOWN: Mapping[int, float] = MappingProxyType({})
# Times known before are in forwards of one row: so many rounds tell how long that is.
_UNITS = 3
# How much a forward counts in how slow the machine is now, how much slower or faster one may look, and how often its
# number of rows must have been seen to tell.
_PACE, _OFF, _SEEN = 0.2, 1.3, 3


class Drafted(NamedTuple):
    """One request's draft in a round: its tokens, those accepted, and whether it was a chain or a tree."""

    drafted: int
    accepted: int
    chain: bool = True


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

    A machine changes its pace, and what was seen while it was slow must not look dearer than what was seen since. So
    times are kept in seconds of a machine of one pace; how slow it is now follows from forwards that were seen before.

    widths  what a forward takes by its rows, in forwards of one row, where it was measured: rather than a prior's.
    """

    def __init__(self, prior: Prior | None = None, widths: Mapping[int, float] = NOTHING_KNOWN) -> None:
        self._target = Curve.of(widths or (prior.widths if prior is not None else {}))
        self._draft = {} if prior is None else {1: Curve.of({0: 0.0, prior.length: prior.drafting})}
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

    def drafting(self, requests: int, budget: int) -> float:
        """Of drafts of at most so many tokens for so many requests; 0 where nothing is known."""
        if budget == 0 or not self._draft:
            return 0.0
        # Unknown numbers take what the nearest known one takes: a draft model reads its weights once for all.
        nearest = min(self._draft, key=lambda known: abs(known - requests))
        return self._pace * self._draft[nearest].at(budget)

    def drafts(self, budget: int) -> int:
        """How often drafts of this budget were timed."""
        return max((curve.counts.get(budget, 0) for curve in self._draft.values()), default=0)

    def add_target(self, width: int, seconds: float, forwards: int = 1) -> None:
        """Takes in a forward, or what each of so many took."""
        if self._begins:
            self._measure(seconds * self._unit / self._target.at(width))
        elif self._target.counts.get(width, 0) >= _SEEN and (usual := self._target.middle(width)) > 0:
            # One alone may be one in which the machine was elsewhere.
            most = _OFF ** min(forwards, 3)
            slower = seconds / (self._pace * usual)
            self._pace *= min(max(slower, 1 / most), most) ** (1 - (1 - _PACE) ** forwards)
        self._target.add(width, seconds / self._pace)

    def add_drafting(self, requests: int, budget: int, seconds: float) -> None:
        """Takes in drafts."""
        self._draft.setdefault(requests, Curve.of({0: 0.0})).add(budget, seconds / self._pace)

    def _measure(self, unit: float) -> None:
        """What was known before becomes seconds."""
        self._units.append(unit)
        before, self._unit = self._unit, sorted(self._units)[(len(self._units) - 1) // 2]
        for curve in (self._target, *self._draft.values()):
            curve.scale(self._unit / before)
        self._begins = len(self._units) < _UNITS


class Gains:
    """Accepted tokens of chains by depth, or of trees by their nodes, once there was any tree."""

    def __init__(self, prior: Prior | None = None) -> None:
        self._chain, self._tree, self._trees = Chain(), Tree(), False
        if prior is not None:
            self._chain.begin(prior.accepted)
            self._tree.begin(prior.length, sum(prior.accepted))

    def add(self, budget: int, drafts: Sequence[Drafted]) -> None:
        """Takes in a round's drafts of at most `budget` tokens."""
        self._chain.fade()
        self._tree.fade()
        self._trees = self._trees or not all(draft.chain for draft in drafts)
        for draft in drafts:
            if self._trees:
                self._tree.add(budget, draft.drafted, draft.accepted)
            else:
                self._chain.add(budget, draft.drafted, draft.accepted)

    def expected(self, most: int) -> tuple[list[float], list[float]]:
        """Accepted tokens and drafted ones, for γ = 0, 1, … `most`."""
        of = self._tree if self._trees else self._chain
        return of.tokens(most), of.lengths(most)
