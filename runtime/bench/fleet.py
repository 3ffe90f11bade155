"""A fleet of replicas on paper: what latency and what cost to expect, from what one replica was measured to do.

Requests come as a Poisson process and are routed as the cluster routes them. Each replica runs rounds as the engine
does: all texts that decode gain a token, and pieces of prompts share the round. A round takes what was measured for so
many texts, and for so many rows of prompts.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from runtime.bench.load import arrivals
from runtime.engine.schedule import MIXED_ROWS, PREFILL_ROWS
from runtime.serve.prefixes import PAGE, Kept, ranked


@dataclass(frozen=True)
class Figures:
    """What one replica does, in seconds.

    overhead  of a request, before its first row and beside all rounds: HTTP, the ingress, Ray.
    prompt    of a row of a prompt.
    rounds    (texts that decode, seconds of a round), rising; between them it is a line, beyond them the last slope.
    """

    overhead: float
    prompt: float
    rounds: tuple[tuple[int, float], ...]

    def round(self, decoding: int, rows: int) -> float:
        """Seconds of a round of so many texts that decode, and so many rows of prompts."""
        spent = self.prompt * rows
        if not decoding:
            return spent
        if len(self.rounds) == 1:
            return spent + self.rounds[0][1]
        pair = next((pair for pair in pairwise(self.rounds) if decoding <= pair[1][0]), tuple(self.rounds[-2:]))
        (low, first), (high, second) = pair
        return spent + first + (second - first) * (decoding - low) / (high - low)


@dataclass(frozen=True)
class Fleet:
    """The replicas.

    at_once  how many compute at full speed: fewer than there are where they share a machine's cores.
    pages    of 64 tokens, that each keeps; price: of one for an hour, in any currency.
    """

    replicas: int
    max_batch: int = 32
    pages: int = 4096
    prefix: bool = True
    balance: float = 1.25
    at_once: float | None = None
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


@dataclass
class _Replica:
    """One replica: texts that run, in the order in which they came, and those that wait."""

    kept: Kept
    running: list[_Text] = field(default_factory=list)
    waiting: deque[_Text] = field(default_factory=deque)
    read: Kept = field(default_factory=Kept)
    working: bool = False
    busy: float = 0.0
    spent: int = 0
    texts: int = 0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)


def simulate(figures: Figures, fleet: Fleet, load: Load) -> Simulated:
    """Requests through the fleet, to the last one's end. Events in the order of time; equal seeds, equal figures."""
    replicas = [_Replica(Kept(fleet.pages), read=Kept(fleet.pages)) for _ in range(fleet.replicas)]
    come = [time + figures.overhead for time in arrivals(load.rate, load.requests, load.seed)]
    chosen = np.random.default_rng(load.seed + 1).integers(0, load.prefixes, load.requests)
    whole = load.shared // PAGE
    events: list[tuple[float, int, int]] = [(time, place, -1) for place, time in enumerate(come)]
    heapq.heapify(events)
    turn, done, reused, end = load.requests, list[tuple[_Text, float]](), 0, 0.0
    ends: dict[int, tuple[list[_Text], list[tuple[_Text, int]]]] = {}

    def begin(now: float, at: int) -> None:
        nonlocal turn, reused
        one = replicas[at]
        while one.waiting and len(one.running) < fleet.max_batch:
            text = one.waiting.popleft()
            known = one.read.known(text.pages) * PAGE
            reused += known
            text.left -= known
            one.running.append(text)
        if one.working or not one.running:
            return
        decoding = [text for text in one.running if not text.left]
        pieces = _pieces([text for text in one.running if text.left], MIXED_ROWS if decoding else PREFILL_ROWS)
        one.working = True
        at_work = sum(other.working for other in replicas)
        slower = max(1.0, at_work / (fleet.at_once or fleet.replicas))
        spent = slower * figures.round(len(decoding), sum(rows for _, rows in pieces))
        one.busy += spent
        ends[turn] = decoding, pieces
        heapq.heappush(events, (now + spent, turn, at))
        turn += 1

    while events:
        now, number, at = heapq.heappop(events)
        if at < 0:
            pages = [f"{chosen[number]} {page}".encode() for page in range(whole)]
            at = _route(replicas, pages, fleet, number)
            replicas[at].waiting.append(_Text(now - figures.overhead, pages, load.prompt))
            begin(now, at)
            continue
        decoding, pieces = ends.pop(number)
        one, one_read = replicas[at], replicas[at].read
        one.working = False
        for text, rows in pieces:
            text.left -= rows
            if not text.left:
                one_read.use(text.pages)
                decoding.append(text)  # its last row gives the first token
        for text in decoding:
            text.gained += 1
            text.first = text.first or now
            if text.gained == load.new_tokens:
                one.running.remove(text)
                done.append((text, now))
                end = max(end, now)
        begin(now, at)
    return _told(fleet, load, replicas, done, reused, end)


def _route(replicas: Sequence[_Replica], pages: Sequence[bytes], fleet: Fleet, number: int) -> int:
    """The place of the replica that a text goes to."""
    known = [one.kept.known(pages) for one in replicas]
    if fleet.prefix:
        at = ranked(known, [one.load for one in replicas], [one.spent for one in replicas], fleet.balance)[0]
    else:  # of two at random the one with less to do, as Ray does it
        two = np.random.default_rng(number).choice(len(replicas), min(2, len(replicas)), replace=False)
        at = int(min(two, key=lambda place: replicas[place].load))
    replicas[at].spent += len(pages) - known[at]
    replicas[at].texts += 1
    replicas[at].kept.use(pages)
    return at


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


def _told(
    fleet: Fleet, load: Load, replicas: Sequence[_Replica], done: Sequence[tuple[_Text, float]], reused: int, end: float
) -> Simulated:
    tokens = load.requests * load.new_tokens
    texts = [one.texts for one in replicas]
    return Simulated(
        percentiles([ended - text.came for text, ended in done]),
        percentiles([text.first - text.came for text, _ in done]),
        reused / max(1, load.requests * (load.shared // PAGE) * PAGE),
        tokens / end,
        sum(one.busy for one in replicas) / (end * fleet.replicas),
        max(texts) * len(texts) / sum(texts),
        1e6 * fleet.price * fleet.replicas * end / 3600 / tokens,
    )


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds of these seconds: mean, p50, p90, p99."""
    shares = {f"p{share}": 1e3 * float(np.percentile(seconds, share)) for share in (50, 90, 99)}
    return {"mean": 1e3 * float(np.mean(seconds)), **shares}
