"""MiniLLM's estimator against the exact gradient, over every text of a toy vocabulary."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.distill.minillm import mixed_writer, policy_gradient

VOCABULARY = 3


def prefixes(length: int) -> list[tuple[int, ...]]:
    """One row of logits for each beginning of a text: (), (a), (a, b)."""
    return [prefix for n in range(length) for prefix in itertools.product(range(VOCABULARY), repeat=n)]


def tables(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(2, len(prefixes(length)), VOCABULARY, dtype=torch.float64, generator=generator)
    return made[0].requires_grad_(), made[1]


def texts(length: int) -> Iterator[tuple[tuple[int, ...], Tensor, list[int]]]:
    """Every text, as a batch of one, and the numbers of its rows of logits."""
    for text in itertools.product(range(VOCABULARY), repeat=length):
        rows = [prefixes(length).index(text[:n]) for n in range(length)]
        yield text, torch.tensor([text]), rows


def log_probability(table: Tensor, text: tuple[int, ...], rows: list[int]) -> Tensor:
    return table.log_softmax(-1)[rows, list(text)]


def exact_gradient(length: int) -> Tensor:
    """Of Σ_y q(y) Σ_t log q(y_t) / p(y_t), by autograd over all texts."""
    student, teacher = tables(length)
    total = torch.zeros((), dtype=torch.float64)
    for text, _, rows in texts(length):
        log_q, log_p = log_probability(student, text, rows), log_probability(teacher, text, rows)
        total = total + log_q.sum().exp() * (log_q - log_p).sum()
    [gradient] = torch.autograd.grad(total, student)
    return gradient


def expected_gradient(mix: float, length: int) -> tuple[Tensor, float]:
    """The estimator's expectation over texts drawn from the mixture, and its total variance."""
    student, teacher = tables(length)
    mean, square = torch.zeros_like(student), torch.zeros_like(student)
    for text, tokens, rows in texts(length):
        found = policy_gradient(student[rows].unsqueeze(0), teacher[rows].unsqueeze(0), tokens, mix)
        [gradient] = torch.autograd.grad(found, student)
        q, p = (log_probability(table, text, rows).exp().detach() for table in (student, teacher))
        chance = float((mix * p + (1 - mix) * q).prod())
        mean += chance * gradient
        square += chance * gradient.square()
    return mean.detach(), float((square - mean.square()).sum())


def test_the_estimator_is_unbiased() -> None:
    """Of two tokens, of which one follows: its mean is its sum. Drawn from the student, all weights are 1."""
    found, _ = expected_gradient(0.0, 2)
    torch.testing.assert_close(found, exact_gradient(2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("mix", "length"), [(0.4, 2), (0.0, 3), (0.4, 3)])
def test_what_the_paper_trades_bias_for(mix: float, length: int) -> None:
    wanted, (found, _) = exact_gradient(length), expected_gradient(mix, length)
    assert float((found - wanted).abs().max()) > 1e-3
    # It still goes down the same hill.
    assert float((found * wanted).sum() / (found.norm() * wanted.norm())) > 0.8


def test_the_single_step_part_lowers_the_variance() -> None:
    student, teacher = tables(2)
    mean, square = torch.zeros_like(student), torch.zeros_like(student)
    for text, _, rows in texts(2):
        log_q, log_p = log_probability(student, text, rows), log_probability(teacher, text, rows)
        reward = (log_p - log_q).detach()
        # Plain REINFORCE: a token's own reward stands with those that follow.
        [gradient] = torch.autograd.grad(-(reward.flip(0).cumsum(0).flip(0) * log_q).sum(), student)
        chance = float(log_q.detach().sum().exp())
        mean += chance * gradient
        square += chance * gradient.square()
    torch.testing.assert_close(mean, exact_gradient(2), rtol=1e-10, atol=1e-12)
    assert expected_gradient(0.0, 2)[1] < 0.7 * float((square - mean.square()).sum())


def test_a_batch_is_the_mean_of_its_texts() -> None:
    chosen = list(texts(3))[3:9]
    student, teacher = (torch.stack([table.detach()[rows] for _, _, rows in chosen]) for table in tables(3))
    tokens = torch.cat([one for _, one, _ in chosen])
    for mix in (0.0, 0.3):
        student.requires_grad_()
        [whole] = torch.autograd.grad(policy_gradient(student, teacher, tokens, mix), student)
        for row in range(len(chosen)):
            one = slice(row, row + 1)
            alone = student[one].detach().requires_grad_()
            [gradient] = torch.autograd.grad(policy_gradient(alone, teacher[one], tokens[one], mix), alone)
            torch.testing.assert_close(whole[row], gradient[0] / len(chosen))


def test_what_does_not_fit_is_refused() -> None:
    logits, tokens = torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        policy_gradient(logits, logits, tokens[:, :2])


class Chain:
    """A decoder (runtime/contract.py) whose next token depends on the last one only."""

    def __init__(self, seed: int):
        self.table = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)) * 1.5
        self.vocab_size, self.device, self.live = 6, torch.device("cpu"), set[int]()

    def new_cache(self) -> "Chain":
        return self

    def open(self, capacity: int) -> int:
        self.live.add(len(self.live))
        return len(self.live) - 1

    def close(self, handle: int) -> None:
        self.live.remove(handle)

    def forward(self, tokens: Tensor, rows: Any, cache: Any, at: Tensor) -> Any:
        assert len(rows) == len(tokens)
        return SimpleNamespace(logits=self.table[tokens[at]])


@pytest.mark.parametrize("mix", [0.3, 0.0])
def test_mixed_texts_are_drawn_from_the_mixture(mix: float) -> None:
    """Both new tokens, given the token before, by chi-squared."""
    student, teacher = Chain(0), Chain(1)
    prompts = torch.tensor([[4, 2]]).expand(8000, 2)
    writer = mixed_writer(student, teacher, mix)  # type: ignore[arg-type]
    written = writer(prompts, 2, torch.Generator().manual_seed(4))
    assert written.shape == (8000, 4)
    assert torch.equal(written[:, :2], prompts)
    assert not student.live and not teacher.live
    q, p = student.table.softmax(-1), teacher.table.softmax(-1)
    mixed, other = mix * p + (1 - mix) * q, (mix + 0.2) * p + (0.8 - mix) * q
    common = int(written[:, 2].bincount().argmax())
    for before, drawn in ((2, written[:, 2]), (common, written[written[:, 2] == common, 3])):
        assert len(drawn) > 1300
        assert _chi_squared(drawn, mixed[before]) < 20.5  # 5 degrees of freedom: a chance of 0.001
    assert _chi_squared(written[:, 2], other[2]) > 40


def _chi_squared(drawn: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double() * len(drawn)
    return float(((torch.bincount(drawn, minlength=6) - expected).square() / expected).sum())
