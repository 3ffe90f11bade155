"""What a worker that runs forwards and its driver say to each other, as channel.py carries it.

    → (nothing: the worker is started)             ← {"weight_bytes": …, "facts": {…}}
    → {"do": "forward", "width": 4, "repeats": 3}  ← {"ms": […]}
    → {"do": "prefill"}                            ← {"ms": [one]}

All engines are timed by the same lines, those of this file; llama_bench.py's binary times itself.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.channel import open_channel, requests

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Options:
    """What a worker is started with; `context` and `prefill` are in tokens, `kernels` the instructions to keep to."""

    model: Path
    threads: int
    context: int
    prefill: int
    vocabulary: int
    kernels: str


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

    def forward(self, tokens: Tokens, logits_from: int) -> NDArray[np.floating]:
        """Appends the tokens; logits (tokens − logits_from, vocabulary) of the rows from there, in memory; timed."""

    def clear(self) -> None:
        """The cache is empty; not timed."""


def arguments() -> argparse.ArgumentParser:
    """Those of every worker that runs forwards."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    for name in ("threads", "context", "prefill", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--kernels", required=True)
    return parser


def serve(build: Callable[[Options], Engine]) -> None:
    """Answers requests until stdin ends."""
    reply = open_channel()
    options = Options(**vars(arguments().parse_args()))
    engine = build(options)
    draw = np.random.default_rng(0)

    def tokens(count: int) -> Tokens:
        return draw.integers(0, options.vocabulary, count)

    reply(asdict(engine.describe()))
    context = tokens(options.context)
    for request in requests():
        if request["do"] == "prefill":
            engine.clear()
            reply({"ms": [_timed(engine, tokens(options.prefill), options.prefill - 1, options.vocabulary)]})
        else:
            width, ms = request["width"], []
            for _ in range(request["repeats"] + 1):
                engine.restore(context, width)
                ms.append(_timed(engine, tokens(width), 0, options.vocabulary))
            # The first is a warm-up: this width's own code and memory.
            reply({"ms": ms[1:]})


def _timed(engine: Engine, tokens: Tokens, logits_from: int, vocabulary: int) -> float:
    """Milliseconds of one forward, whose result is looked at afterwards."""
    began = time.perf_counter()
    logits = engine.forward(tokens, logits_from)
    ms = (time.perf_counter() - began) * 1e3
    rows = len(tokens) - logits_from
    if logits.shape != (rows, vocabulary):
        raise ValueError(f"expected logits ({rows}, {vocabulary}), the engine gave {logits.shape}")
    if not np.isfinite(logits).all() or float(np.ptp(logits)) == 0.0:
        raise ValueError("the engine's logits are not finite, or all the same")
    return ms
