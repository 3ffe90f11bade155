"""What a worker and its driver say to each other: JSON objects, one a line; a request on stdin, its reply on stdout.

    → (nothing: the worker is started)             ← {"weight_bytes": …, "facts": {…}}
    → {"do": "forward", "width": 4, "repeats": 3}  ← {"ms": […]}
    → {"do": "prefill"}                            ← {"ms": [one]}

A worker that fails ends; what it says goes to stderr. All engines are timed by the same lines, those of this file.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
# A process is at rest when all its threads together computed less than this share of an interval.
_INTERVAL_S, _REST_SHARE, _REST_LIMIT_S = 0.02, 0.02, 3.0


@dataclass(frozen=True)
class Options:
    """What a worker is started with; `context` and `prefill` are in tokens."""

    model: Path
    threads: int
    context: int
    prefill: int
    vocabulary: int


@dataclass(frozen=True)
class Description:
    """Bytes of weights that one forward reads, and what a reader of the figures wants to know."""

    weight_bytes: int
    facts: dict[str, str]


class Engine(Protocol):
    """One model in one engine, for one request."""

    def describe(self) -> Description:
        """Called once, first."""

    def restore(self, context: Tokens, width: int) -> None:
        """The cache holds exactly `context`, and the engine is as after a forward of `width` tokens; not timed."""

    def forward(self, tokens: Tokens) -> NDArray[np.floating]:
        """Appends the tokens; logits (tokens, vocabulary) of every row, complete and in memory; timed."""

    def clear(self) -> None:
        """The cache is empty; not timed."""

    def prefill(self, tokens: Tokens) -> NDArray[np.floating]:
        """Appends the tokens; logits (1, vocabulary) of the last row, complete and in memory; timed."""


def serve(build: Callable[[Options], Engine]) -> None:
    """Answers requests until stdin ends."""
    # Libraries print what they like, from C++ as well: file descriptor 1 becomes stderr, the replies keep a copy.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    for name in ("threads", "context", "prefill", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = Options(**vars(parser.parse_args()))
    engine = build(options)
    draw = np.random.default_rng(0)

    def tokens(count: int) -> Tokens:
        return draw.integers(0, options.vocabulary, count)

    def reply(message: dict[str, object]) -> None:
        _rest()
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    reply(asdict(engine.describe()))
    context = tokens(options.context)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "prefill":
            engine.clear()
            reply({"ms": [_timed(engine.prefill, tokens(options.prefill), 1, options.vocabulary)]})
        else:
            width = request["width"]
            engine.restore(context, width)
            _timed(
                engine.forward, tokens(width), width, options.vocabulary
            )  # warm-up: this width's own code and memory
            ms = []
            for _ in range(request["repeats"]):
                engine.restore(context, width)
                ms.append(_timed(engine.forward, tokens(width), width, options.vocabulary))
            reply({"ms": ms})


def _timed(forward: Callable[[Tokens], NDArray[np.floating]], tokens: Tokens, rows: int, vocabulary: int) -> float:
    """Milliseconds of one forward, whose result is looked at afterwards."""
    began = time.perf_counter()
    logits = forward(tokens)
    ms = (time.perf_counter() - began) * 1e3
    if logits.shape != (rows, vocabulary):
        raise ValueError(f"expected logits ({rows}, {vocabulary}), the engine gave {logits.shape}")
    if not np.isfinite(logits).all() or float(np.ptp(logits)) == 0.0:
        raise ValueError("the engine's logits are not finite, or all the same")
    return ms


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
