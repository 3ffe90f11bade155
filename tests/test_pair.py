"""The embedded pair is what the README says: small enough, good enough, and the draft agrees with its target."""

import math

import pytest
import torch

from calib import corpora
from calib.prompts import prompts
from calib.windows import make_windows
from compress.model.source import default_pair
from compress.report.quality import score_window
from compress.report.speculation import teacher_forced_agreement
from runtime import Model, Speculator, load
from runtime.checkpoints.open import open_checkpoint
from runtime.engine.metrics import total
from runtime.sampling.params import Sampling


@pytest.fixture(scope="module")
def pair() -> tuple[Model, Model]:
    target, draft = default_pair()
    return load(target), load(draft)


@pytest.fixture(scope="module")
def corpus() -> corpora.Corpus:
    return corpora.load()


def test_sizes() -> None:
    checkpoints = [open_checkpoint(path) for path in default_pair()]
    counts = [sum(math.prod(c.shape(name)) for name in c.names()) for c in checkpoints]
    assert counts[1] * 10 <= counts[0]
    assert sum(c.bytes_on_disk() for c in checkpoints) <= 40_000_000
    for checkpoint in checkpoints:
        assert {checkpoint.tensor(name).dtype for name in checkpoint.names()} == {torch.bfloat16}
        card = (checkpoint.path / "README.md").read_text()
        assert "bits per byte" in card and "SHA-256" in card and "Apache-2.0" in card


@pytest.mark.slow
def test_bits_per_byte_on_held_out_python(pair: tuple[Model, Model], corpus: corpora.Corpus) -> None:
    target = pair[0]
    windows = make_windows(
        corpus, target.tokenizer, length=1024, calibration=0, evaluation_tokens=16_384, seed=0, separator=0
    )
    nats = sum(float(score_window(target.decoder, target.decoder, w).original_nll.sum()) for w in windows.evaluation)
    assert nats / math.log(2) / int(windows.evaluation_bytes.sum()) <= 1.22


def test_acceptance(pair: tuple[Model, Model], corpus: corpora.Corpus) -> None:
    target, draft = pair
    texts = prompts(corpus, 24, seed=1)
    speculator = Speculator(target, draft, draft_length=4, verify="rejection")
    greedy = total([r.metrics for r in speculator.generate(texts, max_new_tokens=96)])
    assert greedy.acceptance_rate is not None and greedy.acceptance_rate >= 0.45
    hot = [Sampling(temperature=1.0, seed=seed) for seed in range(len(texts))]
    sampled = total([r.metrics for r in speculator.generate(texts, max_new_tokens=96, sampling=hot)])
    assert sampled.acceptance_rate is not None and sampled.acceptance_rate > 0.2
    windows = make_windows(
        corpus, target.tokenizer, length=512, calibration=0, evaluation_tokens=2048, seed=0, separator=0
    )
    same, overlap = teacher_forced_agreement(target, draft, windows.evaluation)
    assert same >= 0.45 and overlap >= 0.45
