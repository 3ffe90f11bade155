"""The worker's end of its two pipes: JSON objects, one a line; a request on stdin, its reply on stdout.

A worker that fails ends; what it says goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Reply = Callable[[dict[str, Any]], None]
# A process is at rest when all its threads together computed less than this share of an interval.
_INTERVAL_S, _REST_SHARE, _REST_LIMIT_S = 0.02, 0.02, 3.0


def open_channel() -> Reply:
    """Takes stdout for replies; to be called before the engine is made. A reply is sent once the process is at rest."""
    # Libraries print what they like, from C++ as well: file descriptor 1 becomes stderr, the replies keep a copy.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        _rest()
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    return reply


def requests() -> Iterator[dict[str, Any]]:
    """Until stdin ends."""
    for line in sys.stdin:
        yield json.loads(line)


def _rest() -> None:
    """Waits until no thread of this process computes: thread pools spin for a while after their work."""
    deadline = time.perf_counter() + _REST_LIMIT_S
    while True:
        computed = time.process_time()
        began = time.perf_counter()
        time.sleep(_INTERVAL_S)
        share = (time.process_time() - computed) / (time.perf_counter() - began)
        if share < _REST_SHARE:
            return
        if time.perf_counter() > deadline:
            raise RuntimeError(f"threads still compute {_REST_LIMIT_S:.0f} s after the work: idle is not idle here")
