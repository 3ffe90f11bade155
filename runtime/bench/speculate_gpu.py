"""Speculation on a GPU: an oracle's known acceptance at a draft's real cost, and batches of the trained pair."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

from runtime.bench.device_models import random_model
from runtime.bench.jobs import Between, oracle_for, random_items
from runtime.bench.measure import Bench, read_bytes
from runtime.bench.options import OracleOptions
from runtime.bench.speculate import Job, measure, row
from runtime.sampling.params import Sampling
from runtime.speculative.draft import NoDrafter


def oracle(bench: Bench, options: OracleOptions, draft_lengths: Sequence[int]) -> None:
    """For each γ a row of what was measured, what τ / (γc + v) predicts, and c and v.

    The draft is another shape in the same scheme; the oracle is right with probability `alpha` a token.
    """
    bench.say(f"making {options.shape} and {options.draft}")
    target = random_model(options.shape, options.scheme, bench.place.device, bench.kernels)
    draft = random_model(options.draft, options.scheme, bench.place.device, bench.kernels, seed=1)
    items = random_items(target.decoder.vocab_size, options.prompts, seed=0)
    plain = Job(target.decoder, NoDrafter(), items, options.new_tokens, 1, Sampling(), "coupled", 0)
    drafter = oracle_for(plain, draft, options.alpha)
    about = {
        "shape": options.shape,
        "draft": options.draft,
        "scheme": options.scheme,
        "acceptance_per_token": options.alpha,
        **{f"{name}_bytes": read_bytes(each.decoder) for name, each in (("target", target), ("draft", draft))},
    }
    for length in draft_lengths:
        job = replace(plain, drafter=drafter, draft_length=length)
        between = Between(job, target, bench.rounds)
        both = measure(job, bench.rounds, bench.say, between)
        costs = between.costs()
        widths = {} if costs is None else {"width_costs": costs.widths, "step_ms": costs.target_ms[1]}
        bench.rows.append(about | widths | row(job, *both, costs))


def batches(bench: Bench, job: Job, sizes: Sequence[int]) -> None:
    """A row of plain and speculative tokens/s for so many requests at a time, and how many texts differ."""
    for size in sizes:
        bench.say(f"batch {size}")
        tried = replace(job, batch=size, items=tuple(islice(cycle(job.items), size)))
        found = row(tried, *measure(tried, bench.rounds, bench.say), None)
        speeds = {f"{name}_tokens_per_second": found[name]["tokens_per_second"] for name in ("plain", "speculative")}
        bench.rows.append(found | speeds)
