"""MiniLLM's estimator against the exact gradient, over every text of a toy vocabulary."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.distill.minillm import mixed_writer, policy_gradient

VOCABULARY, LENGTH = 3, 3
# One row of logits for each beginning of a text: (), (a), (a, b).
PREFIXES = [prefix for n in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=n)]


def tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(2, len(PREFIXES), VOCABULARY, dtype=torch.float64, generator=generator)
    return made[0].requires_grad_(), made[1]


def texts() -> Iterator[tuple[tuple[int, ...], Tensor, list[int]]]:
    """Every text, as a batch of one, and the numbers of its rows of logits."""
    for text in itertools.product(range(VOCABULARY), repeat=LENGTH):
        rows = [PREFIXES.index(text[:n]) for n in range(LENGTH)]
        yield text, torch.tensor([text]), rows


def log_probability(table: Tensor, text: tuple[int, ...], rows: list[int]) -> Tensor:
    return table.log_softmax(-1)[rows, list(text)]


def ended(text: tuple[int, ...]) -> Tensor:
    """Token 0 ends a text; it is part of it."""
    last = text.index(0) if 0 in text else LENGTH - 1
    return torch.tensor([[n <= last for n in range(LENGTH)]])


def everything(text: tuple[int, ...]) -> Tensor:
    return torch.ones(1, LENGTH, dtype=torch.bool)


def exact_gradient(mask_of: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    """Of Σ_y q(y) Σ_t log q(y_t) / p(y_t) over the tokens in the mask, by autograd over all texts."""
    student, teacher = tables()
    total = torch.zeros((), dtype=torch.float64)
    for text, _, rows in texts():
        log_q, log_p = log_probability(student, text, rows), log_probability(teacher, text, rows)
        total = total + log_q.sum().exp() * ((log_q - log_p) * mask_of(text)[0]).sum()
    [gradient] = torch.autograd.grad(total, student)
    return gradient


def expected_gradient(mix: float, mask_of: Callable[[tuple[int, ...]], Tensor], **options: Any) -> tuple[Tensor, float]:
    """The estimator's expectation over texts drawn from the mixture, and its total variance."""
    student, teacher = tables()
    mean, square = torch.zeros_like(student), torch.zeros_like(student)
    for text, tokens, rows in texts():
        found = policy_gradient(
            student[rows].unsqueeze(0), teacher[rows].unsqueeze(0), tokens, mask_of(text), teacher_mix=mix, **options
        )
        [gradient] = torch.autograd.grad(found, student)
        q, p = (log_probability(table, text, rows).exp().detach() for table in (student, teacher))
        chance = float((mix * p + (1 - mix) * q).prod())
        mean += chance * gradient
        square += chance * gradient.square()
    return mean.detach(), float((square - mean.square()).sum())


@pytest.mark.parametrize("mask_of", [everything, ended])
@pytest.mark.parametrize("single_step", [True, False])
@pytest.mark.parametrize("mix", [0.0, 0.4])
def test_the_estimator_is_unbiased(mask_of: Any, single_step: bool, mix: float) -> None:
    found, _ = expected_gradient(mix, mask_of, importance="exact", single_step=single_step, length_normalized=False)
    torch.testing.assert_close(found, exact_gradient(mask_of), rtol=1e-10, atol=1e-12)


def test_what_the_paper_trades_bias_for() -> None:
    wanted = exact_gradient(everything)
    for options in (
        {"importance": "token", "single_step": True, "length_normalized": False},
        {"importance": "exact", "single_step": True, "length_normalized": True},
    ):
        found, _ = expected_gradient(0.4, everything, **options)
        assert float((found - wanted).abs().max()) > 1e-3
        # It still goes down the same hill.
        assert float((found * wanted).sum() / (found.norm() * wanted.norm())) > 0.8


def test_the_single_step_part_lowers_the_variance() -> None:
    options = {"importance": "exact", "length_normalized": False}
    _, plain = expected_gradient(0.0, everything, single_step=False, **options)
    _, parted = expected_gradient(0.0, everything, single_step=True, **options)
    assert parted < 0.7 * plain
    _, product = expected_gradient(0.4, everything, importance="exact", length_normalized=False)
    _, token = expected_gradient(0.4, everything, importance="token", length_normalized=False)
    assert token < product


def test_a_batch_is_the_mean_of_its_texts() -> None:
    chosen = list(texts())[3:9]
    student, teacher = (torch.stack([table.detach()[rows] for _, _, rows in chosen]) for table in tables())
    tokens, mask = torch.cat([one for _, one, _ in chosen]), torch.cat([ended(text) for text, _, _ in chosen])
    every: list[dict[str, Any]] = [{}, {"single_step": False}, {"importance": "exact", "teacher_mix": 0.3}]
    for options in every:
        student.requires_grad_()
        [whole] = torch.autograd.grad(policy_gradient(student, teacher, tokens, mask, **options), student)
        for row in range(len(chosen)):
            one = slice(row, row + 1)
            alone = student[one].detach().requires_grad_()
            part = policy_gradient(alone, teacher[one], tokens[one], mask[one], **options)
            [gradient] = torch.autograd.grad(part, alone)
            torch.testing.assert_close(whole[row], gradient[0] / len(chosen))
        # What comes after the end has no say.
        assert not whole[~mask].any()


def test_what_does_not_fit_is_refused() -> None:
    logits, tokens = torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.int64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        policy_gradient(logits, logits, tokens[:, :2], mask)
    with pytest.raises(ValueError, match="teacher_mix"):
        policy_gradient(logits, logits, tokens, mask, teacher_mix=1.0)
    with pytest.raises(ValueError, match="a text without"):
        policy_gradient(logits, logits, tokens, ~mask)


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
