"""Threads in simulated time: each does its work in order, and those that have some share a machine's cores."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

Then = Callable[[float], None]  # is called with the time


@dataclass
class _Thread:
    """One thread: what it does now, in seconds at full speed, and what waits for it; see Clock.work."""

    left: float = 0.0
    then: Then | None = None
    crowds: bool = False
    waiting: deque[tuple[float, Then, bool]] = field(default_factory=deque)


@dataclass
class Clock:
    """Simulated time.

    cores  that all threads share (processor sharing: each of n that have work runs at min(1, cores / n)); None: each
           has one for itself.
    crowd  how many times longer all work takes while 1, 2, … threads that crowd run: cores share memory and caches, and
           may be two threads of one. The last is that of more, too.
    """

    cores: float | None = None
    crowd: Sequence[float] = (1.0,)
    now: float = 0.0
    _threads: dict[Hashable, _Thread] = field(default_factory=dict)
    _busy: dict[Hashable, _Thread] = field(default_factory=dict)
    _events: list[tuple[float, int, Then]] = field(default_factory=list)
    _count: int = 0

    def at(self, time: float, then: Then) -> None:
        """Calls `then` at this time; of equal ones in the order in which they were asked for."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, then))

    def work(self, thread: Hashable, seconds: float, then: Then, *, crowds: bool = False) -> None:
        """The thread does so much after what it has to do, and then calls `then`."""
        one, asked = self._threads.setdefault(thread, _Thread()), (seconds, then, crowds)
        if one.then is None:
            one.left, one.then, one.crowds = asked
            self._busy[thread] = one
        else:
            one.waiting.append(asked)

    def is_busy(self, thread: Hashable) -> bool:
        """Whether the thread has work."""
        return thread in self._busy

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._events or self._busy:
            event = self._events[0][0] if self._events else math.inf
            speeds = self._speeds()
            ends = {thread: self.now + one.left / speeds[thread] for thread, one in self._busy.items()}
            first = min(ends, key=ends.__getitem__, default=None)
            end = math.inf if first is None else ends[first]
            now = min(event, end)
            for thread, one in self._busy.items():
                one.left = max(0.0, one.left - (now - self.now) * speeds[thread])
            self.now = now
            if event <= end:
                heapq.heappop(self._events)[2](now)
                continue
            assert first is not None
            done = self._busy[first]
            then, done.then = done.then, None
            if done.waiting:
                done.left, done.then, done.crowds = done.waiting.popleft()
            else:
                del self._busy[first]
            assert then is not None
            then(now)

    def _speeds(self) -> dict[Hashable, float]:
        """Of each thread that has work, over what it does alone."""
        if self.cores is None:
            return dict.fromkeys(self._busy, 1.0)
        share = min(1.0, self.cores / max(1, len(self._busy)))
        crowding = sum(one.crowds for one in self._busy.values())
        slower = self.crowd[min(crowding, len(self.crowd)) - 1] if crowding else 1.0
        return dict.fromkeys(self._busy, share / slower)
