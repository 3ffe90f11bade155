"""A SPEED-Bench run as files of the layout that its harness (specdec_bench of NVIDIA's Model-Optimizer) writes.

A folder for each cell: acceptance_rate.json and timing.json, lists with an entry a run; speculation_profile.json (its
schema 1.0); responses.jsonl; configuration.json. Acceptance lengths count the target's own token: 1 is none accepted.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from runtime.bench.speculate import Pass
from runtime.bench.speed_bench import Measured, marginal

PROFILE_SCHEMA = "1.0"
# Drafters whose longer drafts begin with their shorter ones: acceptance at any shorter length follows from this one's.
_CHAINS = {"model": "draft_model", "lookup": "ngram", "suffix": "suffix"}


def acceptance(found: Measured) -> dict[str, Any]:
    """Acceptance by request, by category, and by length."""
    chunks = found.chunks
    by_request = {str(i): fmean(lengths) for i, lengths in enumerate(chunks)}
    counts = Counter(length for lengths in chunks for length in lengths)
    rounds = counts.total()
    conditional: dict[str, float] = {}
    joint: dict[str, float] = {}
    before = 1.0
    for length in range(1, max(counts) + 1):
        share = sum(count for at, count in counts.items() if at >= length) / rounds
        conditional[str(length)], joint[str(length)], before = share / before, share, share
    return {
        "Request_AL": by_request,
        "Category_AL": found.categories,
        "Average_AL": fmean(by_request.values()),
        "Acceptance_Length_Histogram": {str(length): counts[length] for length in sorted(counts)},
        "Conditional_Acceptance_Rate": conditional,
        "Joint_Acceptance_Rate": joint,
    }


def timing(one: Pass) -> dict[str, Any]:
    """Speed of one pass; on one machine its "gpu" is the processor."""
    arrivals = [metrics.arrivals[0] for metrics in one.metrics]
    totals = list(map(len, one.tokens))
    steps = [sorted(set(times)) for times in arrivals]
    gaps = [b - a for times in steps for a, b in pairwise(times)]
    rates = [(total - 1) / (times[-1] - times[0]) for total, times in zip(totals, steps, strict=True) if len(times) > 1]
    speed = sum(totals) / one.seconds
    found: dict[str, Any] = {
        "Output TPS": speed,
        "Output TPS/gpu": speed,
        "E2E Request Time": _statistics([times[-1] for times in arrivals]),
        "TTFT Time": _statistics([times[0] for times in arrivals]),
    }
    if gaps:
        found["Request Generation Step Time"] = _statistics(gaps)
        found["Request Generation Tokens Per Second"] = _statistics(rates)
    return found | {"Number of Output Tokens": _statistics(totals)}


def profile(found: Measured, about: dict[str, Any]) -> dict[str, Any]:
    """How good the drafter was: acceptance by position, given that all before were accepted and together."""
    lengths = [length for lengths in found.chunks for length in lengths]
    joint = (marginal(lengths) + [0.0] * about["draft_length"])[: about["draft_length"]]
    before = [1.0, *joint[:-1]]
    conditional = [share / above if above else 0.0 for share, above in zip(joint, before, strict=True)]
    mean = fmean(lengths)
    implied = 1 + sum(joint)
    per_request = fmean(fmean(one) for one in found.chunks)
    method = _CHAINS.get(about["drafter"])
    said = acceptance(found)
    return {
        "schema_version": PROFILE_SCHEMA,
        "measured": True,
        "method": method or about["drafter"],
        "draft_checkpoint": about["draft"],
        "target_model": about["target"],
        "num_speculative_tokens": about["draft_length"],
        "block_size": None,
        "max_supported_k": about["draft_length"],
        "verification_method": "longest_prefix",
        "conditional_accept_rates": [round(value, 6) for value in conditional],
        "marginal_accept_rates": [round(value, 6) for value in joint],
        "mean_accept_length": round(mean, 6),
        "mean_accept_length_per_request": round(per_request, 6),
        "accept_length_model": "chain_analytic" if method else "measured_per_k",
        "accept_length_by_k": {str(about["draft_length"]): round(mean, 6)},
        "acceptance_length_histogram": said["Acceptance_Length_Histogram"],
        "per_category": said["Category_AL"],
        "measurement_conditions": about["conditions"],
        "validation": {
            "mean_consistency": {
                "implied_mean_accept_length": round(implied, 6),
                "reported_mean_accept_length": round(mean, 6),
                "abs_delta": round(abs(implied - mean), 6),
                "tolerance": 0.02,
                "passed": abs(implied - mean) <= 0.02,
            },
            "marginal_monotonicity": {"passed": all(a >= b for a, b in pairwise(joint)), "violations": []},
        },
    }


def write(folder: Path, found: Measured, about: dict[str, Any], text: Callable[[Sequence[int]], str]) -> None:
    """Writes a cell's files into `folder`/split/concurrency_N.

    about  drafter, draft and target (names or None), draft_length, and the conditions of the measurement.
    text   tokens as text.
    """
    at = folder / found.cell.split / f"concurrency_{found.cell.concurrency}"
    at.mkdir(parents=True, exist_ok=True)
    _json(at / "acceptance_rate.json", [acceptance(found)])
    _json(at / "timing.json", [timing(one) for one in found.spoken])
    _json(at / "timing_plain.json", [timing(one) for one in found.plain])
    _json(at / "speculation_profile.json", profile(found, about))
    _json(at / "configuration.json", about | {"split": found.cell.split, "concurrency": found.cell.concurrency})
    with (at / "responses.jsonl").open("w", encoding="utf-8") as out:
        for i, (item, tokens) in enumerate(zip(found.cell.items, found.spoken[0].tokens, strict=True)):
            line = {
                "question_id": i,
                "category": item.group,
                "turns": [text(item.tokens)],
                "choices": [{"index": 0, "turns": [text(tokens)]}],
            }
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


def _statistics(values: Sequence[float]) -> dict[str, Any]:
    """As its harness has them: texts of four decimals."""
    data = np.asarray(values, dtype=np.float64)
    quantiles = {str(q): f"{np.quantile(data, q):.4f}" for q in (0.25, 0.5, 0.75)}
    named = {"min": data.min(), "max": data.max(), "mean": data.mean(), "std": data.std()}
    return {name: f"{value:.4f}" for name, value in named.items()} | {"quantiles": quantiles}


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")
