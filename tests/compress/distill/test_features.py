"""Losses on hidden states, weights, gradients and relations, against their definitions in float64."""

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor

from compress.distill import features, relations
from compress.distill.features import Projection


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_hidden_states_through_a_projection() -> None:
    student, teacher = _random(5, 3, seed=1), _random(5, 4, seed=2)
    projection = Projection(3, 4).double()
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0])
    mapped = (student @ projection.weight.T).detach()
    squares = [float(((mapped[i] - teacher[i]) ** 2).sum()) / 4 for i in range(5)]
    cosines = [
        float(mapped[i] @ teacher[i]) / math.sqrt(float(mapped[i] @ mapped[i]) * float(teacher[i] @ teacher[i]))
        for i in range(5)
    ]
    share = [w / 4 for w in weights.tolist()]
    mse = features.hidden_mse(student, teacher, projection, weights)
    cosine = features.hidden_cosine(student, teacher, projection, weights)
    assert float(mse.detach()) == pytest.approx(sum(w * s for w, s in zip(share, squares, strict=True)))
    assert float(cosine.detach()) == pytest.approx(sum(w * (1 - c) for w, c in zip(share, cosines, strict=True)))
    (mse + cosine).backward()
    assert projection.weight.grad is not None and projection.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_projections_of_equal_widths_begin_as_the_identity() -> None:
    states = _random(6, 5, seed=3)
    assert float(features.hidden_mse(states, states, Projection(5, 5).double())) == 0
    assert float(features.hidden_cosine(states, 3 * states)) == pytest.approx(0, abs=1e-12)
    torch.manual_seed(0)
    wide = Projection(64, 128).double()(_random(200, 64, seed=4))
    assert float(wide.std()) == pytest.approx(1, rel=0.1)


def _mmd(x: Tensor, y: Tensor, sigma: float) -> float:
    def kernel(a: Tensor, b: Tensor) -> float:
        return math.exp(-float(((a - b) ** 2).sum()) / (2 * sigma**2))

    xx = sum(kernel(a, b) for a, b in permutations(x, 2)) / (len(x) * (len(x) - 1))
    yy = sum(kernel(a, b) for a, b in permutations(y, 2)) / (len(y) * (len(y) - 1))
    return xx + yy - 2 * sum(kernel(a, b) for a in x for b in y) / (len(x) * len(y))


def test_maximum_mean_discrepancy_is_its_definition() -> None:
    x, y = _random(6, 3, seed=5), _random(4, 3, seed=6) + 1
    points = torch.cat([x, y])
    distances = sorted(float((a - b).norm()) for i, a in enumerate(points) for b in points[:i])
    median = distances[(len(distances) - 1) // 2]
    assert features.median_bandwidth(x, y) == pytest.approx(median)
    assert float(features.maximum_mean_discrepancy(x, y)) == pytest.approx(_mmd(x, y, median))
    assert float(features.maximum_mean_discrepancy(x, y, bandwidth=0.7)) == pytest.approx(_mmd(x, y, 0.7))
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda a: features.maximum_mean_discrepancy(a, y, bandwidth=0.7), x)


def test_maximum_mean_discrepancy_is_unbiased() -> None:
    """Around 0 for one distribution, in both directions; clearly above it for two."""
    same, other = [], []
    for seed in range(300):
        x, y = _random(8, 2, seed=1000 + seed), _random(8, 2, seed=5000 + seed)
        same.append(float(features.maximum_mean_discrepancy(x, y, bandwidth=1.0)))
        other.append(float(features.maximum_mean_discrepancy(x, y + 1, bandwidth=1.0)))
    mean, error = torch.tensor(same).mean().item(), torch.tensor(same).std().item() / math.sqrt(300)
    assert abs(mean) < 4 * error
    assert min(same) < 0 < max(same)
    # E k(x, y) for two unit Gaussians of dimension d at distance m under σ = 1: 3^(−d/2) exp(−m² / 6), here d = 2.
    wanted = 2 * (1 / 3) * (1 - math.exp(-2 / 6))
    found, spread = torch.tensor(other).mean().item(), torch.tensor(other).std().item() / math.sqrt(300)
    assert abs(found - wanted) < 4 * spread


@torch.no_grad()
def test_weights_through_projections() -> None:
    student, teacher = _random(3, 2, seed=7), _random(5, 4, seed=8)
    outputs, inputs = Projection(3, 5).double(), Projection(2, 4).double()
    mapped = outputs.weight @ student @ inputs.weight.T
    found = features.weight_l2(student, teacher, outputs, inputs)
    assert float(found) == pytest.approx(float(((mapped - teacher) ** 2).mean()))
    assert float(features.weight_l2(teacher, teacher)) == 0
    with pytest.raises(ValueError, match=r"\(3, 2\)"):
        features.weight_l2(student, teacher)


def test_gradients_of_outputs() -> None:
    """f(x) = Σ tanh(W x): its gradient is known, and a loss on it trains W."""
    x = _random(4, 3, seed=9).requires_grad_()
    weight, other = _random(3, 3, seed=10).requires_grad_(), _random(3, 3, seed=11)

    def by_hand(matrix: Tensor) -> Tensor:
        return (1 - torch.tanh(x @ matrix.T) ** 2) @ matrix

    ours = features.output_gradient(torch.tanh(x @ weight.T), x, learn=True)
    theirs = features.output_gradient(torch.tanh(x @ other.T), x, learn=False)
    torch.testing.assert_close(ours, by_hand(weight))
    assert not theirs.requires_grad
    loss = features.gradient_l2(ours, theirs)
    assert loss.item() == pytest.approx((by_hand(weight) - by_hand(other)).square().mean().item())
    [found] = torch.autograd.grad(loss, weight)
    [wanted] = torch.autograd.grad((by_hand(weight) - by_hand(other).detach()).square().mean(), weight)
    torch.testing.assert_close(found, wanted)


def _huber(difference: float) -> float:
    return 0.5 * difference**2 if abs(difference) < 1 else abs(difference) - 0.5


def test_distance_relations_are_their_definition() -> None:
    student, teacher = _random(5, 3, seed=12), 4 * _random(5, 6, seed=13)

    def table(points: Tensor) -> list[float]:
        found = [float((points[i] - points[j]).norm()) for i in range(5) for j in range(i)]
        mean = sum(found) / len(found)
        return [one / mean for one in found]

    wanted = sum(_huber(a - b) for a, b in zip(table(student), table(teacher), strict=True)) / 10
    assert float(relations.distance_relations(student, teacher)) == pytest.approx(wanted)
    # Scale and place do not count.
    assert float(relations.distance_relations(7 * teacher + 2, teacher)) == pytest.approx(0, abs=1e-12)


def test_angle_relations_are_their_definition() -> None:
    student, teacher = _random(4, 3, seed=14), _random(4, 5, seed=15)

    def cosine(points: Tensor, i: int, j: int, k: int) -> float:
        a, b = points[i] - points[j], points[k] - points[j]
        return float(a @ b / (a.norm() * b.norm()))

    terms = [_huber(cosine(student, *t) - cosine(teacher, *t)) for t in permutations(range(4), 3)]
    assert float(relations.angle_relations(student, teacher)) == pytest.approx(sum(terms) / len(terms))
    turn, _ = torch.linalg.qr(_random(5, 5, seed=16))
    assert float(relations.angle_relations(3 * teacher @ turn, teacher)) == pytest.approx(0, abs=1e-12)
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: relations.angle_relations(x, teacher), student)
    assert torch.autograd.gradcheck(lambda x: relations.distance_relations(x, teacher), student)


def test_layer_similarity_is_linear_cka() -> None:
    states = [_random(7, width, seed=20 + width) + 1 for width in (3, 4, 5)]
    found = relations.layer_similarity(states)
    for i, x in enumerate(states):
        for j, y in enumerate(states):
            a, b = x - x.mean(0), y - y.mean(0)
            cka = (a.T @ b).square().sum() / ((a.T @ a).norm() * (b.T @ b).norm())
            assert float(found[i, j]) == pytest.approx(float(cka))
    turn, _ = torch.linalg.qr(_random(4, 4, seed=30))
    turned = [states[0], 5 * states[1] @ turn + 3, states[2]]
    assert float(relations.layer_relations(turned, states)) == pytest.approx(0, abs=1e-20)
    assert float(relations.layer_relations([states[2], states[1], states[0]], states)) > 1e-4


def test_what_does_not_fit_is_refused() -> None:
    x = _random(4, 3, seed=40)
    with pytest.raises(ValueError, match="one shape"):
        features.hidden_mse(x, _random(4, 5, seed=41))
    with pytest.raises(ValueError, match="not all 0"):
        features.hidden_mse(x, x, weights=torch.zeros(4))
    with pytest.raises(ValueError, match="cannot be compared"):
        features.maximum_mean_discrepancy(x[:1], x)
    with pytest.raises(ValueError, match="at least 3"):
        relations.angle_relations(x[:2], x[:2])
    with pytest.raises(ValueError, match="same tokens"):
        relations.layer_similarity([x, x[:2]])
    with pytest.raises(ValueError, match="choose as many"):
        relations.layer_relations([x], [x, x])
