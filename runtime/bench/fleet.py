"""A fleet of replicas on paper: what latency and what cost to expect, from what one replica was measured to do.

Requests come as a Poisson process and are routed as the cluster routes them. Each replica runs rounds as the engine
does: all texts that decode gain a token, and pieces of prompts share the round. A round takes what was measured for so
many texts, and for so many rows of prompts. The ingress is one thread, through which each request and each replica's
news go in turn; where all share a machine, so do replicas' own servers and the client.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean

import numpy as np

from runtime.bench.fleet_cores import Clock
from runtime.bench.fleet_figures import Figures
from runtime.bench.load import arrivals
from runtime.engine.schedule import MIXED_ROWS, PREFILL_ROWS
from runtime.serve.prefixes import PAGE, Kept, ranked
from runtime.serve.worker import GAP

_RUNS = 8  # of one load, where what rounds take is by chance
_LEAST = 0.1  # cores that are left for the fleet


@dataclass(frozen=True)
class Fleet:
    """The replicas.

    cores  of the one machine that replicas, ingress and client share; None: each has cores of its own.
    pages  of 64 tokens, that each keeps; price: of one for an hour, in any currency.
    """

    replicas: int
    max_batch: int = 32
    pages: int = 4096
    prefix: bool = True
    balance: float = 1.25
    cores: float | None = None
    price: float = 0.0


@dataclass(frozen=True)
class Load:
    """What is asked: `rate` requests a second; of a prompt's tokens the first `shared` are one of `prefixes`."""

    rate: float
    requests: int
    prompt: int
    new_tokens: int
    shared: int = 0
    prefixes: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Simulated:
    """What came of it.

    latency_ms, ttft_ms  of whole texts and first tokens, from when they were asked for: mean, p50, p90, p99.
    reuse      of the tokens that prompts share, those not read again; busy: share of the time that replicas compute.
    imbalance  texts of the most loaded replica over the mean; price_per_million: of new tokens.
    """

    latency_ms: dict[str, float]
    ttft_ms: dict[str, float]
    reuse: float
    tokens_per_second: float
    busy: float
    imbalance: float
    price_per_million: float


@dataclass
class _Text:
    came: float
    pages: Sequence[bytes]
    left: int
    gained: int = 0
    first: float = 0.0
    last: float = 0.0


@dataclass
class _Replica:
    """One replica: texts that run, in the order in which they came, and those that wait; news that was not told yet.

    coming  texts that were routed here and have not arrived: they count from when they are routed.
    """

    place: int
    kept: Kept
    running: list[_Text] = field(default_factory=list)
    waiting: deque[_Text] = field(default_factory=deque)
    read: Kept = field(default_factory=Kept)
    untold: list[_Text] = field(default_factory=list)
    told: float = -1.0
    telling: bool = False
    busy: float = 0.0
    spent: int = 0
    texts: int = 0
    coming: int = 0
    held: float = 0.0
    pace: float = 1.0
    paced_until: float = -1.0

    @property
    def load(self) -> int:
        return self.coming + len(self.running) + len(self.waiting)


def simulate(figures: Figures, fleet: Fleet, load: Load, runs: int = _RUNS) -> Simulated:
    """Requests through the fleet, to the last one's end. Events in the order of time; equal seeds, equal figures.

    runs  where rounds waver, the same requests go through so many times, and all of their texts count.
    """
    chosen = np.random.default_rng(load.seed + 1).integers(0, load.prefixes, load.requests)
    times = arrivals(load.rate, load.requests, load.seed)
    done = []
    for turn in range(runs if any(figures.waver) else 1):
        done.append(run := _Run(figures, fleet, load.new_tokens, load.seed + 2 + turn))
        for number, came in enumerate(times):
            pages = [f"{chosen[number]} {page}".encode() for page in range(load.shared // PAGE)]
            run.ask(number, _Text(came, pages, load.prompt))
        run.clock.run()
    return _told(fleet, load, done)


class _Run:
    """One simulation. A request: the way here, ingress, the others' work, rounds; each round's news: the way back."""

    def __init__(self, figures: Figures, fleet: Fleet, new_tokens: int, seed: int = 0) -> None:
        self._figures, self._fleet, self._new_tokens = figures, fleet, new_tokens
        cores = None if fleet.cores is None else max(_LEAST, fleet.cores - figures.background)
        self.clock = Clock(cores, figures.crowd)
        self.replicas = [_Replica(place, Kept(fleet.pages), read=Kept(fleet.pages)) for place in range(fleet.replicas)]
        self._paces = np.random.default_rng(seed)
        self.done: list[_Text] = []
        self.reused = 0

    def ask(self, number: int, text: _Text) -> None:
        """A request comes at its time."""
        figures, clock = self._figures, self.clock

        def arrive(_: float) -> None:
            clock.work("ingress", figures.early * figures.ingress.request, route)

        def route(_: float) -> None:
            one = _route(self.replicas, text.pages, self._fleet, number)
            if one.running:
                one.held += figures.held

            def begin(_: float) -> None:
                one.coming -= 1
                one.waiting.append(text)
                self._round(one)

            self._beside(one, figures.early * figures.others.request, begin)

        clock.at(text.came + figures.overhead, arrive)

    def _beside(self, one: _Replica, seconds: float, then: Callable[[float], None]) -> None:
        """Work of a replica's own server, of the client and of Ray, where the machine is shared."""
        if self._fleet.cores is None or not seconds:
            then(self.clock.now)
        else:
            self.clock.work(("beside", one.place), seconds, then)

    def _clear_away(self, one: _Replica) -> None:
        """What is left to do for a request whose text has ended."""
        left = 1 - self._figures.early
        if left:
            self.clock.work("ingress", left * self._figures.ingress.request, lambda _: None)
            self._beside(one, left * self._figures.others.request, lambda _: None)

    def _round(self, one: _Replica) -> None:
        """Begins a replica's next round, where it rests and has something to do."""
        figures, thread = self._figures, ("engine", one.place)
        if self.clock.is_busy(thread):
            return
        if not one.running:
            one.held = 0.0
        while one.waiting and len(one.running) < self._fleet.max_batch:
            text = one.waiting.popleft()
            known = one.read.known(text.pages) * PAGE
            self.reused += known
            text.left -= known
            one.running.append(text)
        if not one.running:
            return
        decoding = [text for text in one.running if not text.left]
        pieces = _pieces([text for text in one.running if text.left], MIXED_ROWS if decoding else PREFILL_ROWS)
        began = self.clock.now

        def ended(now: float) -> None:
            one.busy += now - began
            self._gain(one, decoding, pieces)
            self._round(one)

        seconds = self._pace(one) * figures.round(len(decoding), sum(rows for _, rows in pieces))
        # The engine's process answers a request beside the rounds, which take twice as long meanwhile.
        held = min(one.held, seconds)
        one.held -= held
        seconds += held
        self.clock.work(thread, seconds, ended, crowds=True)

    def _pace(self, one: _Replica) -> float:
        """How many times as long a replica's rounds take for a while."""
        waver = self._figures.waver
        if any(waver) and self.clock.now >= one.paced_until:
            beside = sum(self.clock.is_busy(("engine", other.place)) for other in self.replicas)
            one.pace = math.exp(waver[min(beside, len(waver) - 1)] * self._paces.standard_normal())
            one.paced_until = self.clock.now + self._figures.steady
        return one.pace

    def _gain(self, one: _Replica, decoding: list[_Text], pieces: Sequence[tuple[_Text, int]]) -> None:
        """What a round gave: a token for each text that decodes, and for each whose prompt has been read."""
        for text, rows in pieces:
            text.left -= rows
            if not text.left:
                one.read.use(text.pages)
                decoding.append(text)  # its last row gives the first token
        for text in decoding:
            text.gained += 1
            if text.gained == self._new_tokens:
                one.running.remove(text)
        one.untold += decoding
        self._tell(one)

    def _tell(self, one: _Replica) -> None:
        """Tells what is new, unless it can wait, or what was told last is still on its way: then with what follows."""
        at_once = any(not text.first or text.gained == self._new_tokens for text in one.untold)
        if not one.untold or one.telling or not (at_once or self.clock.now - one.told >= GAP):
            return
        news, one.untold, one.told, one.telling = one.untold, [], self.clock.now, True
        ends = [text for text in news if text.gained == self._new_tokens]

        def heard(now: float) -> None:
            for text in news:
                text.first = text.first or now
            for text in ends:
                if not text.last:
                    text.last = now
                    self.done.append(text)
                    self._clear_away(one)
            one.telling = False
            self._tell(one)

        def passed(_: float) -> None:
            self.clock.work("ingress", self._figures.ingress.news(len(news)), heard)

        self._beside(one, self._figures.others.news(len(news)), passed)


def _route(replicas: Sequence[_Replica], pages: Sequence[bytes], fleet: Fleet, number: int) -> _Replica:
    """The replica that a text goes to."""
    known = [one.kept.known(pages) for one in replicas]
    if fleet.prefix:
        load, spent = [one.load for one in replicas], [one.spent for one in replicas]
        at = ranked(known, len(pages), load, spent, fleet.balance)[0]
    else:  # of two at random the one with less to do, as Ray does it
        two = np.random.default_rng(number).choice(len(replicas), min(2, len(replicas)), replace=False)
        at = int(min(two, key=lambda place: replicas[place].load))
    replicas[at].spent += max(1, len(pages) - known[at])
    replicas[at].texts += 1
    replicas[at].coming += 1
    replicas[at].kept.use(pages)
    return replicas[at]


def _pieces(reading: Sequence[_Text], rows: int) -> list[tuple[_Text, int]]:
    """How many rows of each prompt a round reads, as engine.schedule deals them out."""
    out: dict[int, int] = {}
    if reading:
        out[0] = min(reading[0].left, rows - rows // 2)
        rows -= out[0]
    for place in sorted(range(len(reading)), key=lambda place: (reading[place].left - out.get(place, 0), place)):
        more = min(rows, reading[place].left - out.get(place, 0))
        out[place] = out.get(place, 0) + more
        rows -= more
    return [(reading[place], count) for place, count in out.items() if count]


def _told(fleet: Fleet, load: Load, runs: Sequence[_Run]) -> Simulated:
    tokens, ends = load.requests * load.new_tokens, [max(text.last for text in run.done) for run in runs]
    texts = [[one.texts for one in run.replicas] for run in runs]
    hours = fleet.replicas * sum(ends) / 3600
    return Simulated(
        percentiles([text.last - text.came for run in runs for text in run.done]),
        percentiles([text.first - text.came for run in runs for text in run.done]),
        sum(run.reused for run in runs) / max(1, len(runs) * load.requests * (load.shared // PAGE) * PAGE),
        len(runs) * tokens / sum(ends),
        sum(one.busy for run in runs for one in run.replicas) / (fleet.replicas * sum(ends)),
        mean(max(each) * len(each) / sum(each) for each in texts),
        1e6 * fleet.price * hours / len(runs) / tokens,
    )


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds of these seconds: mean, p50, p90, p99."""
    shares = {f"p{share}": 1e3 * float(np.percentile(seconds, share)) for share in (50, 90, 99)}
    return {"mean": 1e3 * float(np.mean(seconds)), **shares}
