"""What a worker that continues texts and its driver say to each other, as channel.py carries it.

    → (nothing: the worker is started)                             ← {"facts": {…}}
    → {"prompt": [ids], "new_tokens": 128, "draft_length": 4}      ← {"tokens": [ids], "ms": 41.8, "cpu_ms": 83.1}

Ids in, ids out: no engine's tokenizer takes part. All engines are timed by the same lines, those of this file, and the
time covers the prompt; `cpu_ms` sums all threads and so tells how many cores an engine really takes.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workers.channel import open_channel, requests

DRAFTERS = ("none", "model", "lookup", "suffix")


@dataclass(frozen=True)
class Options:
    """What a worker is started with.

    target, draft  models in the engine's own format; `draft` is for the drafter "model" only.
    drafter        one of DRAFTERS.
    positions      tokens that prompt and continuation have together, at most.
    """

    target: Path
    draft: Path
    drafter: str
    threads: int
    positions: int


class Engine(Protocol):
    """A target, and what drafts for it."""

    def describe(self) -> dict[str, str]:
        """What a reader of the figures wants to know; called once, first."""

    def generate(self, prompt: list[int], new_tokens: int, draft_length: int | None) -> list[int]:
        """Exactly `new_tokens` greedy tokens, an end token being one like any other; nothing is kept of earlier calls.

        draft_length  tokens drafted a round; None: the engine's own schedule. Without meaning for the drafter "none".
        """


def serve(build: Callable[[Options], Engine]) -> None:
    """Answers requests until stdin ends."""
    reply = open_channel()
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--drafter", choices=DRAFTERS, required=True)
    for name in ("threads", "positions"):
        parser.add_argument(f"--{name}", type=int, required=True)
    engine = build(Options(**vars(parser.parse_args())))
    reply({"facts": engine.describe()})
    for request in requests():
        prompt, count = request["prompt"], request["new_tokens"]
        began, computed = time.perf_counter(), time.process_time()
        tokens = engine.generate(prompt, count, request["draft_length"])
        ms, cpu_ms = (time.perf_counter() - began) * 1e3, (time.process_time() - computed) * 1e3
        if len(tokens) != count:
            raise ValueError(f"expected {count} new tokens, the engine gave {len(tokens)}")
        reply({"tokens": tokens, "ms": ms, "cpu_ms": cpu_ms})
