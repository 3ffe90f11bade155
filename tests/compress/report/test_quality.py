import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from calib.windows import Windows
from compress.errors import UserError
from compress.logits import kl_rows, log_probabilities, token_nll
from compress.report import quality
from compress.report.quality import bootstrap_interval, measure
from compress.report.schema import Divergence, Protocol
from runtime.contract import Out
from runtime.model.hf_adapter import Adapter, adapt

LENGTH = 600  # more than two blocks


def windows_of(count: int, length: int = LENGTH, vocabulary: int = 320) -> Windows:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(vocabulary, (count, length), generator=generator)
    return Windows(
        calibration=tokens[:0],
        evaluation=tokens,
        evaluation_bytes=torch.randint(900, 1100, (count,), generator=generator),
    )


@pytest.fixture(scope="module")
def models(tiny: Callable[..., Path]) -> tuple[Adapter, Adapter]:
    """A tiny Llama, and itself with noise on its weights."""
    path = tiny("llama", max_position_embeddings=LENGTH)
    config = AutoConfig.from_pretrained(path)
    original, changed = (adapt(path, config, torch.device("cpu")) for _ in range(2))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in changed.model.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    return original, changed


def test_measure_is_what_transformers_gives_in_one_forward(models) -> None:
    windows = windows_of(3)
    steps: list[tuple[int, int]] = []
    found, missing = measure(*models, windows, seed=0, on_step=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 3), (2, 3), (3, 3)]

    losses, probabilities = [], []
    for model in models:
        with torch.no_grad():
            logits = model.model(windows.evaluation).logits[:, :-1].double()
        targets = windows.evaluation[:, 1:]
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none"))
        probabilities.append(logits.softmax(-1).flatten(0, 1))
    p, q = probabilities
    kl = (p * (p / q).log()).sum(1)
    assert found.protocol == Protocol(window=LENGTH, stride=LENGTH, tokens=3 * (LENGTH - 1), head="keep")
    total_bytes = int(windows.evaluation_bytes.sum())
    for i, name in enumerate(("original", "compressed")):
        assert getattr(found.perplexity, name) == pytest.approx(math.exp(losses[i].mean()), rel=1e-5)
        assert getattr(found.bits_per_byte, name) == pytest.approx(
            float(losses[i].sum()) / math.log(2) / total_bytes, rel=1e-5
        )
    assert found.kl_divergence.mean == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found.kl_divergence.p99 == pytest.approx(float(kl.quantile(0.99)), rel=1e-3)
    assert found.top1_agreement == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()), abs=2e-3)
    ratio = found.perplexity.compressed / found.perplexity.original
    values = {"original": found.perplexity.original, "compressed": found.perplexity.compressed, "ratio": ratio}
    for name, (low, high) in dict(found.perplexity.ci95).items():
        assert low <= values[name] <= high
        assert low < high
    assert missing == {}


def test_a_model_agrees_with_itself_and_not_with_another(models) -> None:
    windows = windows_of(2, length=300)
    same, _ = measure(models[0], models[0], windows, seed=0)
    assert same.kl_divergence == Divergence(mean=0, p99=0, mean_error=0, median=0, p999=0, max=0)
    assert same.top1_agreement == 1.0
    assert same.perplexity.ci95.ratio == (1.0, 1.0)
    other, _ = measure(*models, windows, seed=0)
    assert other.kl_divergence.mean > 1e-4
    assert other.top1_agreement < 1.0
    assert measure(*models, windows, seed=0)[0] == other


def test_blocks_do_not_change_the_result(models, monkeypatch) -> None:
    windows = windows_of(2, length=200)
    whole, _ = measure(*models, windows, seed=0)
    monkeypatch.setattr(quality, "_BLOCK", 64)
    monkeypatch.setattr(quality, "_ELEMENTS", 1000)
    blocks, _ = measure(*models, windows, seed=0)
    assert blocks.protocol == whole.protocol
    for key in ("original", "compressed"):
        assert getattr(blocks.perplexity, key) == pytest.approx(getattr(whole.perplexity, key), rel=1e-6)
    assert blocks.kl_divergence.mean == pytest.approx(whole.kl_divergence.mean, rel=1e-4)


class Broken(Adapter):
    """Answers with one bad number at one position."""

    bad = math.nan

    def forward(self, tokens, rows, cache, logits_at=None) -> Out:
        out = super().forward(tokens, rows, cache, logits_at)
        hit = (rows.position == 270).nonzero()
        logits = out.logits.clone()
        logits[hit, 5] = self.bad
        return out._replace(logits=logits)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_stop_the_run(models, bad) -> None:
    broken = Broken(models[0].model)
    broken.bad = bad
    expected = rf"compressed model's logits in window 1: expected finite numbers, found {bad} at position 270"
    with pytest.raises(UserError, match=expected):
        measure(models[0], broken, windows_of(1), seed=0)
    with pytest.raises(UserError, match="the original model's logits"):
        measure(broken, models[0], windows_of(1), seed=0)
    broken.bad = 1.0
    assert measure(models[0], broken, windows_of(1), seed=0)[0].top1_agreement <= 1.0


def test_one_window_has_no_interval(models) -> None:
    found, missing = measure(*models, windows_of(1, length=40), seed=0)
    assert found.perplexity.ci95 is None
    assert "one window" in missing["quality.perplexity.ci95"]


def test_what_cannot_be_compared(models, tiny) -> None:
    other = adapt(
        tiny("llama", vocab_size=330), AutoConfig.from_pretrained(tiny("llama", vocab_size=330)), torch.device("cpu")
    )
    with pytest.raises(UserError, match="found 320 entries in the original and 330"):
        measure(models[0], other, windows_of(1, length=20), seed=0)
    with pytest.raises(UserError, match="at most the model's 600 positions, found 601"):
        measure(*models, windows_of(1, length=601), seed=0)
    with pytest.raises(UserError, match="token ids below"):
        measure(*models, windows_of(1, length=400, vocabulary=400), seed=0)
    with pytest.raises(UserError, match="at least one evaluation window"):
        measure(*models, windows_of(0), seed=0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.1, 3.0, 60.0]))
def test_numerics_against_plain_sums(seed, scale) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(5, 23, generator=generator) * scale for _ in range(2))
    targets = torch.randint(23, (5,), generator=generator)
    p, q = log_probabilities(a), log_probabilities(b)
    assert p.dtype == torch.float64
    for row in range(5):
        log_sums = [
            math.log(math.fsum(math.exp(v - max(x)) for v in x)) + max(x) for x in (a[row].tolist(), b[row].tolist())
        ]
        log_p = [v - log_sums[0] for v in a[row].tolist()]
        log_q = [v - log_sums[1] for v in b[row].tolist()]
        assert float(token_nll(p, targets)[row]) == pytest.approx(-log_p[int(targets[row])], rel=1e-12, abs=1e-12)
        kl = math.fsum(math.exp(x) * (x - y) for x, y in zip(log_p, log_q, strict=True))
        assert float(kl_rows(p, q)[row]) == pytest.approx(kl, rel=1e-10, abs=1e-12)
    assert (kl_rows(p, p) == 0).all()
    assert (kl_rows(p, q) >= 0).all()


def test_kl_ignores_what_has_no_probability() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    q = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64).log()
    assert float(kl_rows(p, q)) == pytest.approx(0.5 * math.log(2))
    assert float(kl_rows(q, p)) == math.inf


def test_bootstrap_interval() -> None:
    samples = np.random.default_rng(0).normal(3.0, 2.0, size=(200, 1))

    def mean(means):
        return means[:, 0]

    low, high = bootstrap_interval(samples, mean, seed=0)
    assert bootstrap_interval(samples, mean, seed=0) == (low, high)
    assert bootstrap_interval(samples, mean, seed=1) != (low, high)
    error = samples.std() / math.sqrt(200)
    center = float(samples.mean())
    assert low == pytest.approx(center - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(center + 1.96 * error, abs=0.15 * error)
    narrow = bootstrap_interval(samples, mean, seed=0, level=0.5)
    assert low < narrow[0] < narrow[1] < high
    # Against drawing the samples themselves.
    drawn = samples[np.random.default_rng(5).integers(200, size=(10_000, 200)), 0].mean(1)
    assert [low, high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.1 * error)
    with pytest.raises(ValueError, match="at least 2"):
        bootstrap_interval(samples[:1], mean, seed=0)


def test_pairing_removes_what_both_share() -> None:
    chooser = np.random.default_rng(0)
    hard = chooser.normal(3.0, 1.0, size=64)
    samples = np.stack([hard, hard + 0.01 + chooser.normal(0, 0.001, size=64)], axis=1)
    low, high = bootstrap_interval(samples, lambda m: np.exp(m[:, 1] - m[:, 0]), seed=0)
    alone = bootstrap_interval(samples, lambda m: np.exp(m[:, 1]), seed=0)
    assert low < math.exp(0.01) < high
    assert high - low < 0.001
    assert alone[1] / alone[0] > 1.2
