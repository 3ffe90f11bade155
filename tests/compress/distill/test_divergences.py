"""Divergences against their definitions in float64, their gradients, their limits and their bounds."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.distill import divergences
from compress.distill.divergences import DIVERGENCES, Divergence, collapse, cross_entropy, divergence


def _logits(rows: int, vocabulary: int, seed: int, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    pair = torch.randn(2, rows, vocabulary, dtype=torch.float64, generator=made) * spread
    return pair[0], pair[1]


def _kl(p: Tensor, q: Tensor) -> float:
    """Σ p log(p / q) in plain Python; 0 log 0 is 0."""
    total = 0.0
    for a, b in zip(p.tolist(), q.tolist(), strict=True):
        if a > 0:
            total += a * math.log(a / b) if b > 0 else math.inf
    return total


def _by_definition(kind: Divergence, p: Tensor, q: Tensor, beta: float) -> float:
    m = beta * p + (1 - beta) * q
    if kind == "forward_kl":
        return _kl(p, q)
    if kind == "reverse_kl":
        return _kl(q, p)
    if kind == "jsd":
        return beta * _kl(p, m) + (1 - beta) * _kl(q, m)
    return 0.5 * float((p - q).abs().sum())


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("weights", [None, [0.0, 1.0, 3.0, 0.5, 0.0]])
def test_divergences_are_their_definitions(
    kind: Divergence, temperature: float, weights: list[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of two rows: the fifth stands alone.
    monkeypatch.setattr(divergences, "_BLOCK", 14)
    student, teacher = _logits(5, 7, 1)
    shares = [1.0] * 5 if weights is None else weights
    rows = [
        _by_definition(kind, (teacher[i] / temperature).softmax(-1), (student[i] / temperature).softmax(-1), 0.3)
        for i in range(5)
    ]
    wanted = temperature**2 * sum(w * row for w, row in zip(shares, rows, strict=True)) / sum(shares)
    given_weights = None if weights is None else torch.tensor(weights)
    found = divergence(student, teacher, kind, 0.3, temperature, given_weights)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_of_divergences(kind: Divergence, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergences, "_BLOCK", 12)
    student, teacher = _logits(5, 6, 2, spread=1.0)
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5])
    student.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda logits: 3 * divergence(logits, teacher, kind, 0.8, temperature, weights), student
    )


def test_a_mask_counts_as_weights() -> None:
    student, teacher = _logits(4, 6, 3)
    mask = torch.tensor([True, False, True, False])
    for kind in DIVERGENCES:
        masked = divergence(student, teacher, kind, weights=mask)
        assert float(masked) == pytest.approx(float(divergence(student[mask], teacher[mask], kind)), rel=1e-12)
        assert float(masked) != pytest.approx(float(divergence(student, teacher, kind)), rel=1e-3)


def test_closed_forms_of_two_outcomes() -> None:
    # p = (1/2, 1/2), q = (1/4, 3/4).
    teacher = torch.zeros(1, 2, dtype=torch.float64)
    student = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    assert float(divergence(student, teacher, "forward_kl")) == pytest.approx(0.5 * math.log(4 / 3))
    assert float(divergence(student, teacher, "reverse_kl")) == pytest.approx(0.75 * math.log(3) - math.log(2))
    assert float(divergence(student, teacher, "total_variation")) == pytest.approx(0.25)
    jsd = 0.5 * (0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5)) + 0.5 * (
        0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)
    )
    assert float(divergence(student, teacher, "jsd")) == pytest.approx(jsd)


def test_impossible_tokens() -> None:
    infinite = -math.inf
    teacher = torch.tensor([[0.0, 1.0, infinite, infinite]], dtype=torch.float64)
    student = torch.tensor([[0.5, 0.2, infinite, infinite]], dtype=torch.float64, requires_grad=True)
    p, q = teacher[0, :2].softmax(-1), student.detach()[0, :2].softmax(-1)
    for kind in DIVERGENCES:
        found = divergence(student, teacher, kind)
        assert float(found.detach()) == pytest.approx(_by_definition(kind, p, q, 0.5), rel=1e-12)
        [gradient] = torch.autograd.grad(found, student)
        assert torch.isfinite(gradient).all()
        assert not gradient[:, 2:].any()
    everything = torch.zeros(1, 4, dtype=torch.float64)
    assert float(divergence(everything, teacher, "reverse_kl")) == math.inf
    assert math.isfinite(float(divergence(everything, teacher, "forward_kl")))
    assert math.isfinite(float(divergence(everything, teacher, "jsd")))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(DIVERGENCES),
    beta=st.floats(0.01, 0.99),
    temperature=st.floats(0.3, 4),
    spread=st.floats(0.1, 20),
)
def test_divergences_are_not_negative_and_zero_at_equality(
    seed: int, kind: Divergence, beta: float, temperature: float, spread: float
) -> None:
    student, teacher = _logits(3, 11, seed, spread)
    found = float(divergence(student, teacher, kind, beta, temperature))
    assert found > 0
    # A shift of all logits changes no probability.
    assert float(divergence(teacher + 5, teacher, kind, beta, temperature)) == pytest.approx(0, abs=1e-12)
    most = {"jsd": math.log(2), "total_variation": 1.0}
    if kind in most and (kind != "jsd" or beta == 0.5):
        assert found <= temperature**2 * most[kind] + 1e-12


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_generalised_jsd_tends_to_the_two_kls(seed: int) -> None:
    # No token a thousand times likelier to one than to the other: the limit is far off there.
    student, teacher = _logits(4, 9, seed, spread=0.5)
    small = 1e-6
    near_zero = float(divergence(student, teacher, "jsd", small)) / small
    near_one = float(divergence(student, teacher, "jsd", 1 - small)) / small
    assert near_zero == pytest.approx(float(divergence(student, teacher, "forward_kl")), rel=1e-3)
    assert near_one == pytest.approx(float(divergence(student, teacher, "reverse_kl")), rel=1e-3)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), beta=st.floats(0.05, 0.95))
def test_generalised_jsd_changes_sides(seed: int, beta: float) -> None:
    student, teacher = _logits(4, 9, seed)
    one = float(divergence(student, teacher, "jsd", beta))
    other = float(divergence(teacher, student, "jsd", 1 - beta))
    assert one == pytest.approx(other, rel=1e-9)


def test_temperature_keeps_the_size_of_gradients() -> None:
    student, teacher = _logits(8, 16, 4, spread=0.5)
    student.requires_grad_()
    sizes = []
    for temperature in (5.0, 50.0):
        [gradient] = torch.autograd.grad(divergence(student, teacher, "forward_kl", temperature=temperature), student)
        sizes.append(float(gradient.norm()))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)


def test_cross_entropy() -> None:
    student, _ = _logits(5, 7, 5)
    labels = torch.tensor([0, 6, 3, 3, 1])
    rows = [-math.log(float(student[i].softmax(-1)[label])) for i, label in enumerate(labels.tolist())]
    assert float(cross_entropy(student, labels)) == pytest.approx(sum(rows) / 5, rel=1e-12)
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: cross_entropy(logits, labels), student)


def test_half_precision_is_computed_in_float32() -> None:
    student, teacher = (one.bfloat16() for one in _logits(64, 300, 6))
    student.requires_grad_()
    for kind in DIVERGENCES:
        found = divergence(student, teacher, kind)
        exact = student.detach().double().requires_grad_()
        wanted = divergence(exact, teacher.double(), kind)
        assert found.dtype == torch.float32
        assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
        [ours], [theirs] = torch.autograd.grad(found, student), torch.autograd.grad(wanted, exact)
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=1e-7)


def test_the_teacher_is_a_constant() -> None:
    student, teacher = _logits(3, 5, 7)
    student.requires_grad_()
    teacher.requires_grad_()
    divergence(student, teacher, "reverse_kl").backward()
    assert student.grad is not None
    assert teacher.grad is None


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 7))
def test_collapsed_distributions_are_proper(seed: int, k: int) -> None:
    student, teacher = _logits(4, 8, seed)
    kept = teacher.topk(k, dim=-1).indices
    p, q = collapse(teacher, kept), collapse(student, kept)
    assert p.shape == (4, k + 1)
    torch.testing.assert_close(p.exp().sum(-1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(p[:, :k].exp(), teacher.softmax(-1).gather(1, kept))
    for kind in DIVERGENCES:
        whole = float(divergence(student, teacher, kind))
        # Merging classes can only bring two distributions nearer; with one class in the rest nothing is merged.
        part = float(divergence(q, p, kind))
        assert part <= whole + 1e-12
        if k == 7:
            assert part == pytest.approx(whole, rel=1e-9)


def test_gradients_flow_through_a_collapsed_student() -> None:
    student, teacher = _logits(3, 6, 10)
    kept = teacher.topk(2, dim=-1).indices
    student.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda logits: divergence(collapse(logits, kept), collapse(teacher, kept), "forward_kl"), student
    )


def _error(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def test_what_does_not_fit_is_refused() -> None:
    student, teacher = _logits(3, 5, 11)
    assert "(3, 4)" in _error(lambda: divergence(student, teacher[:, :4], "forward_kl"))
    assert "temperature" in _error(lambda: divergence(student, teacher, "forward_kl", temperature=0))
    assert "beta" in _error(lambda: divergence(student, teacher, "jsd", beta=1.0))
    assert "kind" in _error(lambda: divergence(student, teacher, "kl"))  # type: ignore[arg-type]
    assert "not all 0" in _error(lambda: divergence(student, teacher, "jsd", weights=torch.zeros(3)))
    assert "negative" in _error(lambda: divergence(student, teacher, "jsd", weights=torch.tensor([-1.0, 2, 1])))
    assert "labels" in _error(lambda: cross_entropy(student, torch.zeros(2, dtype=torch.int64)))
    assert "kept" in _error(lambda: collapse(student, torch.zeros(3, 5, dtype=torch.int64)))
