"""Agreement and acceptance of a draft against what both models say, token by token."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.distill.acceptance import measure, teacher_forced
from compress.report.speculation import teacher_forced_agreement
from compress.training import float_model
from runtime import load

WINDOWS = torch.randint(0, 320, (10, 24), generator=torch.Generator().manual_seed(3))
PROMPTS = WINDOWS[:3, :8].tolist()


def test_agreement_over_all_windows(tiny: Callable[..., Path]) -> None:
    target, draft = load(tiny("llama")), load(tiny("llama", seed=5, num_hidden_layers=1))
    with torch.no_grad():
        logits = [float_model.load(model.path)(WINDOWS).logits for model in (target, draft)]
    agreed = (logits[0].argmax(-1) == logits[1].argmax(-1)).double().mean()
    overlap = torch.minimum(logits[0].softmax(-1), logits[1].softmax(-1)).sum(-1).mean()
    found = teacher_forced(target, draft, WINDOWS)
    assert found[0] == pytest.approx(float(agreed), abs=0.01)
    assert found[1] == pytest.approx(float(overlap), abs=1e-4)
    # The report reads the same windows where they are few.
    assert found == pytest.approx(teacher_forced_agreement(target, draft, WINDOWS), abs=1e-6)


def test_a_perfect_draft_and_a_stranger(tiny: Callable[..., Path]) -> None:
    target, stranger = load(tiny("llama")), load(tiny("llama", seed=5, num_hidden_layers=1))
    perfect = measure(target, load(tiny("llama")), WINDOWS, PROMPTS, 16)
    assert (perfect.acceptance_rate, perfect.agreement) == (1.0, 1.0)
    assert perfect.agreement_t1 == pytest.approx(1, abs=1e-5)
    poor = measure(target, stranger, WINDOWS, PROMPTS, 16)
    assert poor.acceptance_rate is not None and poor.acceptance_rate < 0.3
    assert poor.agreement < 0.2
    assert poor == measure(target, stranger, WINDOWS, PROMPTS, 16)
