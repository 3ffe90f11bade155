"""Speculation on a GPU: an oracle's known acceptance at a draft's real cost, and batches of the trained pair."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import numpy as np

from runtime.bench.device_models import random_model, read_bytes
from runtime.bench.jobs import Between
from runtime.bench.measure import Place
from runtime.bench.oracle import OracleDrafter
from runtime.bench.speculate import Item, Job, Way, measure, row, run_once
from runtime.model.load import Model
from runtime.sampling.params import Sampling
from runtime.speculate import NoDrafter

_PROMPT = 64


def oracle(
    place: Place,
    shape: str,
    draft_shape: str,
    scheme: str,
    alpha: float,
    draft_lengths: Sequence[int],
    prompts: int,
    new_tokens: int,
    rounds: int,
    kernels: str,
    say: Callable[[str], None],
) -> tuple[list[dict[str, Any]], Model]:
    """For each γ what was measured, what τ / (γc + v) predicts, and c and v; and the target.

    The draft is another shape in the same scheme; the oracle is right with probability `alpha` a token.
    """
    say(f"making {shape} and {draft_shape}")
    target = random_model(shape, scheme, place.device, kernels)
    draft = random_model(draft_shape, scheme, place.device, kernels, seed=1)
    vocabulary = target.decoder.vocab_size
    draws = np.random.default_rng(0).integers(0, vocabulary, (prompts, _PROMPT))
    items = tuple(Item(one, "random tokens") for one in draws.tolist())
    nothing = NoDrafter()
    job = Job(target.decoder, nothing, items, new_tokens, 1, Sampling(), "coupled", 0)
    plain = run_once(job, Way(nothing, 0, target.decoder.new_cache()))
    known = {tuple(item.tokens): text for item, text in zip(items, plain.tokens, strict=True)}
    found = []
    for length in draft_lengths:
        drafter = OracleDrafter(draft, known, alpha, vocab_size=vocabulary)
        tried = replace(job, drafter=drafter, draft_length=length)
        between = Between(tried, target, rounds)
        ways = measure(tried, nothing, rounds, say, between)
        about = {"shape": shape, "draft": draft_shape, "scheme": scheme, "acceptance_per_token": alpha}
        bytes_of = {"target_bytes": read_bytes(target), "draft_bytes": read_bytes(draft)}
        costs = between.costs()
        widths = {} if costs is None else {"width_costs": costs.widths, "step_ms": costs.target_ms[1]}
        found.append(about | bytes_of | widths | row(tried, *ways, costs))
    return found, target


def batches(job: Job, sizes: Sequence[int], rounds: int, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Plain and speculative tokens/s of so many requests at a time, and how many texts differ."""
    for size in sizes:
        say(f"batch {size}")
        tried = replace(job, batch=size, items=tuple(islice(cycle(job.items), size)))
        ways = measure(tried, NoDrafter(), rounds, say)
        found = row(tried, *ways, None)
        yield found | {
            "plain_tokens_per_second": found["plain"]["tokens_per_second"],
            "speculative_tokens_per_second": found["speculative"]["tokens_per_second"],
        }
