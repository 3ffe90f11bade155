"""The loop: speculative output equals plain output, with any drafter, draft length and batch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from runtime.engine.metrics import Metrics, total
from runtime.sampling.params import Sampling
from runtime.speculate import Speculator
from runtime.speculative.draft import Draft, Request
from runtime.speculative.drafters.lookup import LookupDrafter
from tests.runtime.speculated import PROMPTS, Fake, TreeDrafter, drafter_for, plain


@pytest.mark.parametrize("gamma", [1, 4, 12])
@pytest.mark.parametrize("kind", ["good", "bad", "lookup", "tree"])
def test_greedy_equals_plain_greedy(fake: Fake, kind: str, gamma: int) -> None:
    target = fake(0)
    expected = plain(target, PROMPTS, max_new_tokens=50)
    alone = Speculator(target, drafter_for(kind, fake, target), draft_length=gamma)
    assert [alone.generate([prompt], max_new_tokens=50)[0].tokens for prompt in PROMPTS] == expected
    batch = Speculator(target, drafter_for(kind, fake, target), draft_length=gamma)
    results = batch.generate(PROMPTS, max_new_tokens=50)
    assert [result.tokens for result in results] == expected
    metrics = total([result.metrics for result in results])
    if kind == "good" or (kind == "tree" and gamma > 4):
        assert metrics.accepted > 60
        assert metrics.tokens_per_round is not None and metrics.tokens_per_round > 1.3
    assert all(not cache.slots for cache in target.decoder.caches)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.6}, {"frequency_penalty": 0.7, "presence_penalty": 0.4}])
def test_penalties_see_the_drafted_prefix(fake: Fake, options: dict[str, Any]) -> None:
    target = fake(0)
    expected = plain(target, PROMPTS, max_new_tokens=40, **options)
    assert expected != plain(target, PROMPTS, max_new_tokens=40)
    results = Speculator(target, fake(0, noise=1.0), draft_length=6).generate(PROMPTS, max_new_tokens=40, **options)
    assert [result.tokens for result in results] == expected
    assert total([result.metrics for result in results]).accepted > 20


@pytest.mark.parametrize("kind", ["good", "bad", "lookup", "tree"])
def test_a_seed_s_text_is_the_same_with_speculation(fake: Fake, kind: str) -> None:
    """50 seeds, alone and in a batch with other seeds beside them."""
    target = fake(0)
    samplings = [Sampling(temperature=0.8, top_p=0.95, seed=seed) for seed in range(50)]
    prompts = [PROMPTS[seed % 4] for seed in range(50)]
    expected = [plain(target, [p], max_new_tokens=16, sampling=s)[0] for p, s in zip(prompts, samplings, strict=True)]
    assert len({tuple(tokens) for tokens in expected}) == 50
    alone = Speculator(target, drafter_for(kind, fake, target), draft_length=6)
    for prompt, sampling, tokens in zip(prompts, samplings, expected, strict=True):
        assert alone.generate([prompt], max_new_tokens=16, sampling=sampling)[0].tokens == tokens
    together = Speculator(target, drafter_for(kind, fake, target), draft_length=6)
    results = together.generate(prompts, max_new_tokens=16, sampling=samplings)
    assert [result.tokens for result in results] == expected
    if kind == "good":
        assert total([result.metrics for result in results]).accepted > 100


def test_rejection_follows_the_distribution_over_two_tokens(
    constant: Callable[[np.ndarray], Any], chi_squared: Callable[[np.ndarray, np.ndarray], float]
) -> None:
    p = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
    q = np.array([0.05, 0.1, 0.2, 0.25, 0.4])
    prompts, samplings = [[1, 2]] * 300, [Sampling(temperature=1.0, seed=seed) for seed in range(300)]

    def pairs(target: Any, draft: Any) -> np.ndarray:
        speculator = Speculator(target, draft, draft_length=3, verify="rejection")
        counts = np.zeros((5, 5))
        for result in speculator.generate(prompts, max_new_tokens=20, sampling=samplings):
            for a, b in zip(result.tokens[::2], result.tokens[1::2], strict=True):
                counts[a, b] += 1
        return counts

    expected = np.outer(p, p)
    for draft in (constant(p), constant(q), LookupDrafter(), None):
        assert chi_squared(pairs(constant(p), draft), expected) > 1e-3
    # The harness sees a distribution that is a little off.
    assert chi_squared(pairs(constant(np.array([0.44, 0.25, 0.17, 0.1, 0.04])), constant(q)), expected) < 1e-3


def test_a_broken_cache_is_noticed(fake: Fake) -> None:
    """truncate that leaves a wrong token at the end: the comparison above fails on it."""
    expected = plain(fake(0), PROMPTS, max_new_tokens=50)
    draft = fake(0, noise=1.0)
    broken = Speculator(fake(0, broken=True), draft, draft_length=4).generate(PROMPTS, max_new_tokens=50)
    assert [result.tokens for result in broken] != expected


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5}])
def test_stopping_is_the_same(fake: Fake, options: dict[str, Any]) -> None:
    """At every token that the plain text could stop at, wherever it falls in a draft."""
    target, draft = fake(0), fake(0, noise=0.7)
    [text] = plain(target, [PROMPTS[0]], max_new_tokens=24, **options)
    for stop in dict.fromkeys(text):
        until = text[: text.index(stop) + 1]
        for gamma in (0, 3, 12):
            [result] = Speculator(target, draft, gamma).generate([PROMPTS[0]], 24, stop=[stop], **options)
            assert result.tokens == until and result.finish == "stop"
            assert result.metrics.new_tokens == len(until)
    for limit in (1, 2, 5, 24):
        for gamma in (0, 3, 12):
            [result] = Speculator(target, draft, gamma).generate([PROMPTS[0]], limit, **options)
            assert result.tokens == text[:limit] and result.finish == "length"


def test_the_model_s_own_stop_tokens(fake: Fake) -> None:
    [text] = plain(fake(0), [PROMPTS[0]], max_new_tokens=24)
    target = fake(0, end_tokens=[text[7]])
    until = text[: text.index(text[7]) + 1]
    assert Speculator(target).generate([PROMPTS[0]], 24)[0].tokens == until
    assert Speculator(target).generate([PROMPTS[0]], 24, stop=())[0].tokens == text


def test_texts_end_with_the_positions(fake: Fake) -> None:
    target, draft = fake(0, max_positions=20), fake(0, noise=0.5, max_positions=14)
    for gamma in (0, 4, 12):
        [result] = Speculator(target, draft, gamma).generate([PROMPTS[0]], max_new_tokens=100)
        assert result.tokens == plain(fake(0), [PROMPTS[0]], max_new_tokens=17)[0] and result.finish == "length"


def test_finished_requests_leave_the_batch(fake: Fake) -> None:
    target = fake(0)
    [text] = plain(target, [PROMPTS[0]], max_new_tokens=20)
    target.decoder.widths.clear()
    Speculator(target).generate([PROMPTS[0], PROMPTS[3]], 20, stop=[text[4]])
    assert target.decoder.widths[0] == len(PROMPTS[0]) + len(PROMPTS[3])
    assert target.decoder.widths[1:5] == [2] * 4 and target.decoder.widths[5:] == [1] * 15


def test_long_prompts_are_fed_in_pieces(fake: Fake) -> None:
    target = fake(0)
    Speculator(target).generate([[i % 300 for i in range(1100)]], 2)
    assert target.decoder.widths == [512, 512, 76, 1]


def test_outcomes_tell_what_was_accepted(fake: Fake) -> None:
    target = fake(0)
    drafter = TreeDrafter(target)
    Speculator(target, drafter, draft_length=8).generate([PROMPTS[0]], 30)
    assert drafter.seen[0].path == [] and drafter.seen[0].length == 0  # the prompt
    assert any(outcome.path == [1, 4] for outcome in drafter.seen)
    for outcome in drafter.seen:
        assert outcome.hidden is not None and outcome.hidden.shape == (outcome.length + 1, 4)
        # The fake's hidden states are lengths of text: they grow by one along the path.
        assert outcome.hidden[:, 0].diff().tolist() == [1.0] * outcome.length
    assert drafter.closed == [0]


def test_a_request_holds_no_noise_when_it_is_done(fake: Fake) -> None:
    """Draft and target share each position's noise; with a large vocabulary it is megabytes."""
    requests: list[Request] = []

    class Watching(LookupDrafter):
        def propose(self, live: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
            requests.extend(live)
            return super().propose(live, budgets)

    Speculator(fake(0), Watching(), draft_length=4).generate(PROMPTS, 20, temperature=1.0)
    noises = {id(request.noise): request.noise for request in requests}.values()
    assert len(noises) == len(PROMPTS) and all(not noise._kept for noise in noises)


def test_metrics_add_up(fake: Fake) -> None:
    speculator = Speculator(fake(0), fake(0, noise=1.0), draft_length=4)
    results = speculator.generate(PROMPTS, max_new_tokens=31)
    metrics = total([result.metrics for result in results])
    assert metrics.requests == 4 and metrics.prompt_tokens == sum(map(len, PROMPTS)) and metrics.new_tokens == 4 * 31
    assert metrics.gained == 4 * 30 == metrics.accepted + metrics.rounds
    assert metrics.target_forwards == metrics.rounds
    assert metrics.target_rows == metrics.rounds + metrics.drafted
    assert len(metrics.drafted_at) == len(metrics.accepted_at) == 4
    assert sum(metrics.draft_lengths) == metrics.rounds and metrics.draft_lengths[4] > 1
    assert metrics.kv_bytes == 8 * (metrics.prompt_tokens + metrics.new_tokens)
    judged = np.add(metrics.accepted_at, metrics.rejected_at)
    assert metrics.accepted_by_position == pytest.approx(np.cumprod(metrics.accepted_at / judged).tolist())
    # Only texts' last drafts were shorter.
    drafted = np.divide(metrics.accepted_at, metrics.drafted_at).tolist()
    assert metrics.accepted_by_position == pytest.approx(drafted, abs=0.02)
    assert judged[0] == metrics.drafted_at[0] and judged[1] <= metrics.accepted_at[0]
    assert metrics.seconds >= metrics.draft_seconds + metrics.target_seconds + metrics.prompt_seconds > 0
    assert all(times == sorted(times) and len(times) == 31 for times in metrics.arrivals)
    assert set(metrics.report()) == {"tokens_per_second", "ttft_ms", "itl_ms", "latency_ms", "mean_width"}
    alone = Speculator(fake(0)).generate(PROMPTS, max_new_tokens=31)
    assert total([result.metrics for result in alone]).mean_width == 1
    assert Metrics().acceptance_rate is None and Metrics().tokens_per_second is None and total([]) == Metrics()
