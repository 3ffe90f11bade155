"""What the speculation and load benchmarks compute, on models that cost nothing."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.bench.jobs import facts_of, opened_job
from runtime.bench.load import Bound, Served, arrivals, highest_rate, serve
from runtime.bench.options import SpeculateOptions
from runtime.bench.prompts import Prompt, read_prompts
from runtime.bench.speculate import Item, Job, Way, measure, percentiles, row
from runtime.engine.metrics import total
from runtime.errors import UserError
from runtime.sampling.params import Sampling
from runtime.speculative.costs import StepCosts
from runtime.speculative.draft_length import Controller
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.model import ModelDrafter

Fake = Callable[..., Any]
ITEMS = tuple(Item([i, 2 * i, 3 + i], "even" if i % 2 == 0 else "odd") for i in range(6))


def job(fake: Fake, drafter: Any = None, **options: Any) -> Job:
    given: dict[str, Any] = {"batch": 2, "sampling": Sampling(), "rule": "coupled", "draft_length": 3} | options
    return Job(fake(0).decoder, drafter or ModelDrafter(fake(0, noise=0.5)), ITEMS, 20, **given)


@pytest.mark.parametrize("gamma", [3, None])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=2)])
def test_a_run_adds_up_and_no_token_differs(fake: Fake, gamma: int | None, sampling: Sampling) -> None:
    found = job(fake, draft_length=gamma, sampling=sampling)
    plain, spoken = measure(found, 3, lambda _: None)
    result = row(found, plain, spoken, None)
    json.dumps(result)
    assert result["mismatches"] == 0 and result["tokens_compared"] == result["new_tokens"] == 6 * 20
    assert result["rounds"] == 3 and result["batch"] == 2 and len(plain.passes) == 3
    speeds = [120 / one.seconds for one in spoken.passes]
    assert result["speculative"]["tokens_per_second"] == pytest.approx(np.median(speeds))
    assert [group["name"] for group in result["groups"]] == ["even", "odd"]
    assert sum(group["prompts"] for group in result["groups"]) == 6
    if gamma is not None:
        assert 0.3 < result["acceptance_rate"] < 1 and result["tokens_per_round"] > 1.5
    assert result["predicted_speedup"] is None and result["predicted_with_prompts"] is None


def test_the_prediction_is_tau_over_costs(fake: Fake) -> None:
    found = job(fake, batch=1)
    plain, spoken = measure(found, 1, lambda _: None)
    costs = StepCosts(10, {1: 2.0, 5: 3.0}, 3, {1: 1.0, 5: 1.5})
    result = row(found, plain, spoken, costs)
    gamma = result["drafted_per_round"]
    step = plain.counts.target_seconds / plain.counts.rounds
    c = spoken.counts.draft_seconds / spoken.counts.drafted / step
    assert result["draft_cost_ratio"] == pytest.approx(c) and c > 0
    counts = spoken.counts
    later = (counts.draft_seconds - counts.first_seconds) / (counts.drafted - counts.first_drafted) / step
    assert result["draft_step_ratio"] == pytest.approx(later) and later > 0
    predicted = result["tokens_per_round"] / (gamma * c + 1 + 0.5 * gamma / 4)
    assert result["predicted_speedup"] == pytest.approx(predicted)
    base = plain.counts
    decoding = (base.seconds - base.prompt_seconds) / predicted
    assert result["predicted_with_prompts"] == pytest.approx(base.seconds / (counts.prompt_seconds + decoding))


def test_a_schema_s_forced_tokens_are_drafted(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "object", "properties": {"surname": {"enum": ["Hopper", "Noether"]}},
                                  "required": ["surname"], "additionalProperties": False}))  # fmt: skip
    options = SpeculateOptions(shape="pair", drafter="grammar", schema=schema, count=2, new_tokens=40, threads=1)
    with opened_job(options) as (found, model):
        plain, spoken = measure(found, 1, lambda _: None)
        result = row(found, plain, spoken, None)
        # The last token is one that ends texts.
        texts = [model.tokenizer.decode(text[:-1]) for text in plain.passes[0].tokens]
    assert facts_of(found, model)["random_weights"] is True
    assert set(texts) <= {'{"surname":"Hopper"}', '{"surname":"Noether"}'}
    assert result["drafter"] == "grammar" and result["acceptance_rate"] == 1.0 and result["mismatches"] == 0
    assert spoken.counts.rounds < plain.counts.rounds / 2


def test_the_drafter_grammar_wants_a_schema() -> None:
    with pytest.raises(UserError, match="--schema"), opened_job(SpeculateOptions(shape="pair", drafter="grammar")):
        pass


def test_a_slow_round_does_not_move_the_drafts_cost(fake: Fake) -> None:
    found = job(fake, batch=1)
    plain, spoken = measure(found, 3, lambda _: None)
    before = sorted(_costs(plain, spoken))[1]
    for one in spoken.passes[1].metrics:
        one.draft_seconds += 100.0
    after = row(found, plain, spoken, None)["draft_cost_ratio"]
    assert before <= after == pytest.approx(sorted(_costs(plain, spoken))[1]) and after < 100


def _costs(plain: Way, spoken: Way) -> list[float]:
    pairs = [(total(a.metrics), total(b.metrics)) for a, b in zip(spoken.passes, plain.passes, strict=True)]
    return [a.draft_seconds / a.drafted / (b.target_seconds / b.rounds) for a, b in pairs]


def test_a_mismatch_is_counted_and_rejection_is_not_compared(fake: Fake) -> None:
    found = job(fake)
    plain, spoken = measure(found, 1, lambda _: None)
    spoken.passes[0].tokens[2][5] += 1
    assert row(found, plain, spoken, None)["mismatches"] == 1
    free = job(fake, rule="rejection", sampling=Sampling(temperature=1.0))
    assert row(free, *measure(free, 1, lambda _: None), None)["mismatches"] is None


def test_percentiles() -> None:
    assert percentiles([i / 1000 for i in range(100)]) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}


def test_arrivals_are_poisson() -> None:
    times = np.array(arrivals(5.0, 20_000, seed=0))
    gaps = np.diff(times)
    assert gaps.min() > 0 and times[-1] == pytest.approx(4000, rel=0.03)
    # Exponential: as wide as its mean.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert arrivals(5.0, 10, 0) == times[:10].tolist() and arrivals(5.0, 10, 1) != times[:10].tolist()


@pytest.mark.parametrize("length", [0, 3, Controller()])
def test_a_load_is_served(fake: Fake, length: Any) -> None:
    found = job(fake, LookupDrafter(), batch=8)
    served = serve(found, Way(found.drafter, length, found.decoder.new_cache()), 200.0, 30, seed=0)
    assert served.requests == 30 and 0 < served.requests_per_second < 400 and served.mean_batch >= 1
    for one in (served.latency_ms, served.ttft_ms, served.itl_ms):
        assert one["p50"] is not None and one["p90"] is not None and 0 <= one["p50"] <= one["p90"]
    assert served.ttft_ms["p50"] < served.latency_ms["p50"]  # type: ignore[operator]


def test_waiting_counts(fake: Fake) -> None:
    """One at a time, all at once: the last one waits for all others."""
    found = job(fake, LookupDrafter(), batch=1)
    served = serve(found, Way(found.drafter, 0, found.decoder.new_cache()), 1e6, 20, seed=0)
    assert served.latency_ms["p90"] > served.latency_ms["p50"] > 0  # type: ignore[operator]


@pytest.mark.parametrize("limit", [0.3, 3.0, 40.0])
@pytest.mark.parametrize("start", [0.5, 5.0, 64.0])
def test_the_highest_rate_is_found(limit: float, start: float) -> None:
    def run(rate: float) -> Served:
        late = {"p50": 1.0, "p90": 10.0 if rate <= limit else 1000.0, "p99": 1.0}
        return Served(rate, 10, rate, 1.0, late, {"p90": 1.0}, {}, 1.0 if rate <= limit else 3.0)

    held, tried = highest_rate(run, start, Bound(100.0, 5.0))
    assert held is not None and limit * 0.9 < held <= limit and len(tried) <= 16
    none, _ = highest_rate(run, start, Bound(5.0, None))
    assert none is None
    # Where the bound breaks although requests never meet, no lower rate would hold, and none is waited for.
    _, tried = highest_rate(run, start, Bound(0.5, None))
    assert [one.rate <= limit for one in tried] == [False] * (len(tried) - 1) + [True]
    assert Bound(None, None).holds(run(1e9)) and not Bound(None, 0.5).holds(run(0.1))


def test_prompts_of_all_kinds(tmp_path: Path) -> None:
    bench = tmp_path / "question.jsonl"
    bench.write_text(
        '{"question_id": 1, "category": "writing", "turns": ["first", "second"]}\n\n'
        '{"question_id": 2, "category": "rag", "turns": ["other"]}\n'
    )
    assert read_prompts(bench) == [Prompt("first", "mt_bench"), Prompt("other", "rag")]
    human = tmp_path / "HumanEval.jsonl.gz"
    human.write_bytes(gzip.compress(b'{"task_id": "HumanEval/0", "prompt": "def f():\\n"}\n'))
    assert read_prompts(human) == [Prompt("def f():\n", "HumanEval")]
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert read_prompts(own) == [Prompt("a", "own"), Prompt("b", "own")]
    lines = tmp_path / "lines.txt"
    lines.write_text("one\n\ntwo\n")
    assert read_prompts(lines) == [Prompt("one", "lines"), Prompt("two", "lines")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "x"}\nnot json\n', "line 2 of a.jsonl is not JSON"),
        ("a.jsonl", b'{"turns": []}\n', "line 1 of a.jsonl has none of"),
        ("a.jsonl", b'{"prompt": 3}\n', "line 1 of a.jsonl has none of"),
        ("a.jsonl", b"[1]\n", "line 1 of a.jsonl has none of"),
        ("a.jsonl", b"\n", "holds no prompt"),
        ("a.txt", b"\xff\xfe", "cannot be read"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        (None, b"", "cannot be read"),
    ],
)
def test_prompts_that_are_none(tmp_path: Path, name: str | None, content: bytes, message: str) -> None:
    path = tmp_path / (name or "missing.txt")
    if name is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(path)
