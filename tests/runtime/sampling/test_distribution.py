"""Distributions against transformers' own processors, and the noise that draws from them."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import UserError
from runtime.native.binding import library
from runtime.sampling.distribution import Distributions, argmax_tokens
from runtime.sampling.noise import Memo, Stream, by_numpy, exponential, pick, race, uniforms
from runtime.sampling.params import Sampling
from tests.probabilities import probabilities

CASES = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=1.7, top_k=5),
    Sampling(temperature=0.9, top_k=10_000),
    Sampling(temperature=1.2, top_p=0.6),
    Sampling(temperature=1.0, top_p=1e-6),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=0.8, repetition_penalty=1.5),
    Sampling(temperature=0.8, repetition_penalty=0.7),
    Sampling(temperature=1.1, top_k=9, top_p=0.8, min_p=0.05, repetition_penalty=1.3),
]


def by_transformers(logits: torch.Tensor, sampling: Sampling, prefixes: list[list[int]]) -> torch.Tensor:
    from transformers.generation import logits_process as lp

    processors: list[Any] = []
    if sampling.repetition_penalty != 1:
        processors.append(lp.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(lp.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(lp.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(lp.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(lp.MinPLogitsWarper(sampling.min_p))
    rows = []
    for row, prefix in zip(logits.double(), prefixes, strict=True):
        rows.append(lp.LogitsProcessorList(processors)(torch.tensor([prefix]), row[None])[0].softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_probabilities_equal_transformers(sampling: Sampling) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 3
    tokens, paths = [7, 3, 3, 49], [[], [1], [1, 7], [2]]
    expected = by_transformers(logits, sampling, [tokens + path for path in paths])
    found = probabilities(logits, sampling, tokens, paths, prompt_length=2)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
    # Row by row, bit for bit: what else is in the batch does not matter.
    for i, path in enumerate(paths):
        assert torch.equal(found[i], probabilities(logits[i : i + 1], sampling, tokens, [path], 2)[0])


def test_every_case_changes_something() -> None:
    """Against a comparison that passes because the processors do nothing."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)) * 3
    plain = probabilities(logits, Sampling(temperature=1.0), [7, 3])
    for sampling in CASES[1:]:
        assert not torch.allclose(probabilities(logits, sampling, [7, 3, 3, 49], [[]]), plain)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.randn(2, 10, generator=torch.Generator().manual_seed(2)).double()
    sampling = Sampling(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    # The prompt is [1, 1, 2]; generated: [3, 4, 3], and in the second row a drafted 3 and 5.
    found = probabilities(logits, sampling, [1, 1, 2, 3, 4, 3], [[], [3, 5]], prompt_length=3)
    expected = logits.clone()
    expected[0, [3, 4]] -= torch.tensor([0.5 + 2 * 0.25, 0.5 + 0.25]).double()
    expected[1, [3, 4, 5]] -= torch.tensor([0.5 + 3 * 0.25, 0.5 + 0.25, 0.5 + 0.25]).double()
    torch.testing.assert_close(found, expected.softmax(-1))


def test_greedy_is_the_argmax_after_penalties() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.9, -1.0], [2.0, 2.0, 0.0, -1.0]])
    assert Distributions(logits, Sampling()).argmax() == [1, 0]  # the lowest id of equals
    penalised = Sampling(repetition_penalty=1.5)
    assert Distributions(logits, penalised, [1], [[], [0]]).argmax() == [2, 0]
    assert Distributions(logits, penalised, [1, 1], [[2], []]).argmax() == [1, 0]
    torch.testing.assert_close(probabilities(logits, penalised, [1], [[], [0]]).float(), torch.eye(4)[[2, 0]])


def test_a_penalty_next_to_0_leaves_probabilities() -> None:
    for penalty in (1e-320, 1e300):
        sampling = Sampling(temperature=0.5, top_p=0.9, repetition_penalty=penalty)
        row = probabilities(torch.tensor([[3.0, 2.0, -1.0]]), sampling, [0, 2])[0]
        assert row.isfinite().all() and abs(row.sum() - 1) < 1e-12, row


def test_logit_bias_is_added_before_the_penalties() -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5, -1.0]]).double()
    bias = {1: 3.0, 3: -1.5, 77: 100.0}
    # Token 1 is positive after its bias, so the repetition penalty divides it; nothing happens to an id beyond the row.
    sampling = Sampling(temperature=1.0, logit_bias=bias, repetition_penalty=2.0, presence_penalty=0.25)
    expected = torch.tensor([1.0, 1.0 / 2 - 0.25, 0.5, -2.5 * 2 - 0.25]).double().softmax(-1)
    torch.testing.assert_close(probabilities(logits, sampling, [9, 1], [[3]], prompt_length=1)[0], expected)
    assert Distributions(logits, Sampling()).argmax() == [0]
    assert Distributions(logits, Sampling(logit_bias={2: 0.6})).argmax() == [2]
    assert Distributions(logits, Sampling(logit_bias={2: 0.4})).argmax() == [0]


def test_logit_bias_is_transformers_sequence_bias() -> None:
    from transformers.generation import logits_process as lp

    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4)).double()
    bias = {7: 2.5, 0: -4.0, 49: -100.0}
    processor = lp.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    expected = processor(torch.tensor([[1]] * 3), logits).softmax(-1)
    found = probabilities(logits, Sampling(temperature=1.0, logit_bias=bias))
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, logits.softmax(-1))


def test_min_tokens_counts_the_drafted_prefix() -> None:
    """Two generated tokens, three wanted: the first row cannot stop, the one behind a drafted token can."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 3)
    tokens, paths, stop = [5, 5, 5, 1, 2], [[], [1], [1, 1]], frozenset([0, 1, 77])
    arguments = (tokens, paths, 3, stop)
    greedy = Sampling(min_tokens=3)
    assert Distributions(logits, greedy, *arguments).argmax() == [2, 0, 0]
    assert Distributions(logits, greedy, tokens, paths, 3).argmax() == [0, 0, 0]
    assert Distributions(logits, Sampling(min_tokens=4), *arguments).argmax() == [2, 2, 0]
    found = probabilities(logits, Sampling(temperature=1.0, min_tokens=3, logit_bias={0: 5.0}), *arguments)
    assert found[0].tolist()[:2] == [0, 0] and found[0].sum() == pytest.approx(1)
    biased = torch.tensor([8.0, 2.0, 1.0, 0.0]).double().softmax(-1)
    torch.testing.assert_close(found[1:], biased.expand(2, 4))


def test_min_tokens_that_leave_nothing_to_choose() -> None:
    logits = torch.tensor([1.0, float("-inf"), 0.0])
    for sampling in (Sampling(min_tokens=1), Sampling(min_tokens=1, temperature=1.0)):
        with pytest.raises(UserError, match="min_tokens is 1, but after 0 tokens only stop tokens can follow"):
            probabilities(logits, sampling, stop_tokens=[0, 2])
        assert probabilities(logits, sampling, stop_tokens=[0]).tolist() == [0, 0, 1]


def test_plain_means_that_the_raw_argmax_is_taken() -> None:
    assert Sampling().plain and Sampling(temperature=2.0, top_k=3, top_p=0.5, min_p=0.1, seed=4).plain
    for options in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {3: 0.1}},
        {"min_tokens": 1},
    ):
        assert not Sampling(**options).plain


def test_equal_biases_make_equal_descriptions() -> None:
    one, other = Sampling(logit_bias={3: 1.0, 1: 2.0}), Sampling(logit_bias={1: 2.0, 3: 1.0})
    assert one == other and hash(one) == hash(other) and one.logit_bias == ((1, 2.0), (3, 1.0))
    assert dataclasses.replace(one, seed=1).logit_bias == one.logit_bias
    assert one != Sampling(logit_bias={1: 2.0, 3: 1.5})


def test_temperature_goes_to_the_argmax_without_overflow() -> None:
    logits = torch.tensor([3e4, -3e4, 2.9e4, float("-inf")])
    row = probabilities(logits, Sampling(temperature=1e-300))
    assert row.tolist() == [1, 0, 0, 0]


def test_rows_are_computed_on_demand() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    rows = Distributions(logits, Sampling(temperature=1.0))
    assert len(rows) == 3
    torch.testing.assert_close(rows[1], logits[1].double().softmax(-1))


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("temperature", -0.1, 0.0),
        ("temperature", float("nan"), 5.0),
        ("temperature", float("inf"), 1.0),
        ("top_k", -1, 0),
        ("top_p", 0.0, 1.0),
        ("top_p", 1.1, 0.1),
        ("min_p", -0.1, 0.0),
        ("min_p", 1.5, 1.0),
        ("repetition_penalty", 0.0, 0.5),
        ("presence_penalty", 2.5, -2.0),
        ("frequency_penalty", float("nan"), 2.0),
        ("seed", -1, 0),
        ("seed", 2**64, 2**64 - 1),
        ("min_tokens", -1, 0),
        ("min_tokens", 1.5, 3),
    ],
)
def test_values_out_of_range(key: str, bad: Any, good: Any) -> None:
    assert getattr(dataclasses.replace(Sampling(), **{key: good}), key) == good
    with pytest.raises(UserError, match=f"^{key} must be .* but is "):
        dataclasses.replace(Sampling(), **{key: bad})


@pytest.mark.parametrize("bad", [{-1: 1.0}, {3: float("nan")}, {3: float("inf")}, {3: -float("inf")}, {"3": 1.0}])
def test_biases_out_of_range(bad: Any) -> None:
    with pytest.raises(UserError, match=r"^logit_bias must map token ids"):
        Sampling(logit_bias={2: 1.0, **bad})
    Sampling(logit_bias={0: -1e30, 3: 1e30})


def test_logits_that_are_not_finite() -> None:
    assert argmax_tokens(torch.tensor([[1.0, float("-inf")], [2.0, 2.0]]), "target") == [0, 0]
    for bad in (float("nan"), float("inf")):
        with pytest.raises(UserError, match="target's logits"):
            argmax_tokens(torch.tensor([[1.0, 2.0], [bad, 0.0]]), "target")


def test_finite_choices_are_numpy_s_and_torch_s_argmax() -> None:
    """Of equals the first; a NaN anywhere in a row is seen, also in a vocabulary of many vector lengths."""
    logits = torch.randn(5, 3001, generator=torch.Generator().manual_seed(5)).mul(2).round()
    expected = [int(row.eq(row.max()).nonzero()[0]) for row in logits]
    assert argmax_tokens(logits, "target") == argmax_tokens(logits.numpy(), "target") == expected
    assert argmax_tokens(logits.bfloat16(), "target") == expected
    for place in (0, 1500, 3000):
        damaged = logits.clone()
        damaged[3, place] = float("nan")
        with pytest.raises(UserError, match="draft's logits"):
            argmax_tokens(damaged, "draft")


def test_top_p_sorts_what_matters_only() -> None:
    """Bit for bit what sorting the whole row gives: peaked and flat rows, equal probabilities, sums on the limit."""

    def sorted_whole(row: np.ndarray, top_p: float) -> np.ndarray:
        ascending = np.sort(row)
        dropped = int(np.searchsorted(np.cumsum(ascending), 1 - top_p, side="right"))
        kept = np.where(row < ascending[min(dropped, len(row) - 1)], 0.0, row)
        return kept / kept.sum()

    random, dropped = np.random.default_rng(0), 0
    for trial in range(400):
        size = int(random.integers(1, 300))
        logits = torch.from_numpy(random.standard_normal(size) * random.choice([0.0, 0.1, 1.0, 4.0, 30.0]))
        if trial % 2:
            logits = logits.round()
        plain = probabilities(logits, Sampling(temperature=1.0)).numpy()
        # Limits at random, and limits that a sum of these very probabilities meets exactly or almost.
        met = 1 - float(np.cumsum(np.sort(plain))[random.integers(size)])
        for top_p in (float(random.uniform(0.001, 1)), 0.5, 1 - 1e-12, min(max(met, 1e-9), 1 - 1e-9)):
            found = probabilities(logits, Sampling(temperature=1.0, top_p=top_p)).numpy()
            assert np.array_equal(found, sorted_whole(plain, top_p))
            dropped += int((found == 0).sum() > (plain == 0).sum())
    assert dropped > 400


def test_noise_is_a_function_of_seed_position_and_stream() -> None:
    drawn = {
        tuple(uniforms(seed, position, stream, 4))
        for seed in (0, 1, 2**64 - 1)
        for position in (0, 1, 999)
        for stream in Stream
    }
    assert len(drawn) == 3 * 3 * len(Stream)
    assert np.array_equal(uniforms(5, 6, Stream.DRAFT, 3), uniforms(5, 6, Stream.DRAFT, 9)[:3])
    many = uniforms(1, 2, Stream.CHOICE, 100_000)
    assert many.min() > 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.005
    assert abs(exponential(1, 2, 100_000).mean() - 1) < 0.02


def test_the_stream_of_numbers_never_changes() -> None:
    """A seed's text must survive a change of numpy or of this file."""
    assert uniforms(42, 7, Stream.CHOICE, 2).tolist() == [0.649420079613736, 0.8848813535936771]
    for seed, position, stream in ((0, 0, Stream.CHOICE), (2**64 - 1, 2**40, Stream.DRAFT), (9, 5, Stream.ACCEPT)):
        words = np.random.Philox(key=seed | position << 64, counter=int(stream) << 192).random_raw(5001)
        expected = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        assert np.array_equal(uniforms(seed, position, stream, 5001), expected)
        assert np.array_equal(exponential(seed, position, 77), -np.log(uniforms(seed, position, Stream.CHOICE, 77)))


def test_a_memo_of_noise_gives_the_same_noise() -> None:
    memo, random = Memo(), np.random.default_rng(1)
    for position in range(30):
        memo.forget(position)
        for at in [*range(position, position + 12), *random.integers(0, 50, 3).tolist()]:
            for count in (5, 6):
                assert np.array_equal(memo.exponential(3, at, count), exponential(3, at, count))
    memo.forget()
    # Drawn once while it is wanted, anew when it was forgotten, and another seed's noise is another.
    first = memo.exponential(3, 40, 9)
    assert memo.exponential(3, 40, 9) is first
    assert not np.array_equal(memo.exponential(4, 40, 9), first)
    memo.forget(40)
    assert memo.exponential(3, 40, 9) is first
    memo.forget(41)
    assert memo.exponential(3, 40, 9) is not first


def test_pick_inverts_the_cumulative_sum() -> None:
    weights = np.array([0.0, 2.0, 0.0, 1.0, 1.0, 0.0])
    assert [pick(weights, u) for u in (1e-16, 0.49, 0.5, 0.74, 0.76, 1 - 2**-53)] == [1, 1, 3, 3, 4, 4]


def test_a_race_is_never_won_by_the_impossible() -> None:
    row = np.array([0.0, 0.25, 0.75, 0.0])
    drawn = [race(row, exponential(seed, 3, 4)) for seed in range(400)]
    assert set(drawn) == {1, 2} and 60 < drawn.count(1) < 140


@pytest.mark.skipif(library()[0] is None, reason=library()[1])
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**63),
    stream=st.sampled_from(Stream),
    count=st.integers(0, 70),
)
def test_native_noise_is_numpy_s(seed: int, position: int, stream: Stream, count: int) -> None:
    native, other = uniforms(seed, position, stream, count), by_numpy(seed, position, stream, count)
    assert native.dtype == other.dtype and np.array_equal(native, other)
    assert count == 0 or not np.array_equal(native, by_numpy(seed ^ 1, position, stream, count))


def test_noise_without_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = exponential(7, 30, 5000)
    monkeypatch.setattr("runtime.sampling.noise.library", lambda: (None, "left out"))
    assert np.array_equal(exponential(7, 30, 5000), with_it)
