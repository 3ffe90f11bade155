"""Losses on hidden states, attention, relations and gradients, against their definitions in float64."""

import math
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.distill import features
from compress.distill.objective import DistilledTask, Objective, objective_loss
from compress.errors import UserError
from compress.recipe.training_stages import LossWeights
from compress.training import float_model

LOSSES = tuple(LossWeights.model_fields)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_hidden_states_of_as_many_blocks_are_compared_one_by_one() -> None:
    student = [_random(2, 3, 4, seed=number) for number in range(4)]
    teacher = [5 * _random(2, 3, 4, seed=number + 10) for number in range(4)]
    each = [((a - b) ** 2).mean() / (b**2).mean() for a, b in zip(student[1:], teacher[1:], strict=True)]
    assert float(features.hidden_distance(student, teacher)) == pytest.approx(float(torch.stack(each).mean()))
    assert float(features.hidden_distance(student[1:], teacher)) == pytest.approx(float(each[-1]))


def test_attention_is_compared_head_by_head_or_on_average() -> None:
    def attention(heads: int, seed: int) -> Tensor:
        scores = _random(2, heads, 5, 5, seed=seed).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        return scores.softmax(-1)

    def kl(p: Tensor, q: Tensor) -> float:
        terms = [float(a * (a / b).log()) if a > 0 else 0.0 for a, b in zip(p.flatten(), q.flatten(), strict=True)]
        return sum(terms) / (p.numel() / 5)

    student, teacher, fewer = attention(4, 1), attention(4, 2), attention(3, 3)
    assert float(features.attention_divergence(student, teacher)) == pytest.approx(kl(teacher, student))
    assert float(features.attention_divergence(fewer, teacher)) == pytest.approx(kl(teacher.mean(1), fewer.mean(1)))
    assert float(features.attention_divergence(teacher, teacher)) == pytest.approx(0, abs=1e-12)


def test_gradients_of_the_texts_log_probability() -> None:
    """Of logits W tanh(x): the gradient is known, and a loss on it trains W."""
    x, labels = _random(2, 4, 3, seed=9).requires_grad_(), torch.tensor([[0, 1, 2, 4], [3, 3, 0, 1]])
    weight, other = _random(5, 3, seed=10).requires_grad_(), _random(5, 3, seed=11)

    def by_hand(matrix: Tensor) -> Tensor:
        logits = torch.tanh(x) @ matrix.T
        wrong = torch.nn.functional.one_hot(labels, 5) - logits.softmax(-1)
        return (wrong @ matrix) * (1 - torch.tanh(x) ** 2)

    ours = features.label_gradient(torch.tanh(x) @ weight.T, labels, x, learn=True)
    theirs = features.label_gradient(torch.tanh(x) @ other.T, labels, x, learn=False)
    torch.testing.assert_close(ours, by_hand(weight))
    assert not theirs.requires_grad
    [found] = torch.autograd.grad(features.relative_distance(ours, theirs), weight)
    wanted_loss = (by_hand(weight) - theirs).square().mean() / theirs.square().mean()
    [wanted] = torch.autograd.grad(wanted_loss, weight)
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
    assert float(features.distance_relations(student, teacher)) == pytest.approx(wanted)
    # Scale and place do not count.
    assert float(features.distance_relations(7 * teacher + 2, teacher)) == pytest.approx(0, abs=1e-12)


def test_angle_relations_are_their_definition() -> None:
    student, teacher = _random(4, 3, seed=14), _random(4, 5, seed=15)

    def cosine(points: Tensor, i: int, j: int, k: int) -> float:
        a, b = points[i] - points[j], points[k] - points[j]
        return float(a @ b / (a.norm() * b.norm()))

    terms = [_huber(cosine(student, *t) - cosine(teacher, *t)) for t in permutations(range(4), 3)]
    assert float(features.angle_relations(student, teacher)) == pytest.approx(sum(terms) / len(terms))
    turn, _ = torch.linalg.qr(_random(5, 5, seed=16))
    assert float(features.angle_relations(3 * teacher @ turn, teacher)) == pytest.approx(0, abs=1e-12)
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: features.angle_relations(x, teacher), student)
    assert torch.autograd.gradcheck(lambda x: features.distance_relations(x, teacher), student)


def test_relations_are_of_evenly_spaced_tokens() -> None:
    student, teacher = _random(3, 50, 4, seed=21), _random(3, 50, 6, seed=22)
    chosen = [i * 150 // 64 for i in range(64)]
    mine, theirs = student.reshape(150, 4)[chosen], teacher.reshape(150, 6)[chosen]
    wanted = features.distance_relations(mine, theirs) + 2 * features.angle_relations(mine, theirs)
    assert float(features.relations(student, teacher)) == pytest.approx(float(wanted))


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_of_a_recipe_trains(tiny: Callable[..., Path], name: str) -> None:
    """Some steps on one batch, from other weights than the teacher's, lower it."""
    teacher, student = (float_model.load(tiny("llama")) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    batch = torch.randint(0, 64, (2, 17), generator=generator)
    task = DistilledTask(student, teacher, batch[:, 1:], Objective({name: 2.0}), autocast=False)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    found = []
    for _ in range(6):
        loss = task.loss(batch, 0.0)
        assert loss.parts[name] == pytest.approx(float(loss.value.detach()) / 2)
        found.append(loss.parts[name])
        optimizer.zero_grad()
        loss.value.backward()
        optimizer.step()
    assert 0 < found[-1] < 0.97 * found[0] and all(map(math.isfinite, found))
    assert all(parameter.grad is None for parameter in teacher.parameters())
    if name != "cross_entropy":
        same = objective_loss(Objective({name: 1.0}), teacher, teacher, batch)
        assert same.parts[name] == pytest.approx(0, abs=1e-5)


def test_models_of_other_widths_are_compared_where_they_can_be(tiny: Callable[..., Path]) -> None:
    teacher, student = float_model.load(tiny("llama")), float_model.load(tiny("llama", hidden_size=32))
    batch = torch.arange(34).view(2, 17)
    for name in ("hidden_states", "gradients"):
        with pytest.raises(UserError, match=rf"loss\.{name}: expected a model as wide as its teacher"):
            DistilledTask(student, teacher, batch, Objective({name: 1.0}), autocast=False)
    for name in ("attention", "relations"):
        task = DistilledTask(student, teacher, batch, Objective({name: 1.0}), autocast=False)
        assert task.loss(batch, 0.0).parts[name] > 0
