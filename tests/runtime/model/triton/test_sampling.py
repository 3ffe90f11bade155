"""Choices made on the device: noise of the same bits, the tokens that the CPU chooses, nothing of the neighbours."""

import numpy as np
import pytest
import torch

from runtime.model.on_device import ARGMAX, NON_FINITE, RowSampling
from runtime.model.triton.sampling import candidates, next_tokens
from runtime.sampling import noise
from runtime.sampling.candidates import ranked
from runtime.sampling.distribution import Distributions
from runtime.sampling.noise import Stream
from runtime.sampling.params import Sampling
from runtime.sampling.processors import softmax

VOCABULARY = 1003
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.3, seed=2**64 - 5, top_k=40),
    Sampling(temperature=1.0, seed=3, top_p=0.8),
    Sampling(temperature=0.9, seed=2**63, min_p=0.1),
    Sampling(temperature=1.1, seed=9, top_k=100, top_p=0.9, min_p=0.02),
    Sampling(temperature=1e-6, seed=4),
]


def logits_of(rows: int, device: str, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))).to(device)


def test_uniforms_are_those_of_the_cpu(device: str) -> None:
    from runtime.kernels.triton.philox import uniforms

    keys = [(7, 3), (2**64 - 5, 9), (2**63 - 1, 100_000)]
    signed = torch.tensor([[(seed + 2**63) % 2**64 - 2**63, position] for seed, position in keys]).to(device)
    for stream in (Stream.CHOICE, Stream.DRAFT):
        for count in (1, 2051):
            got = uniforms(signed, count, stream).cpu().numpy()
            want = [noise.by_numpy(seed, position, stream, count) for seed, position in keys]
            assert np.array_equal(got, np.stack(want))


@pytest.mark.parametrize("limit", [None, 700])
def test_tokens_are_those_of_the_cpu(device: str, limit: int | None) -> None:
    count = 6 * len(SAMPLINGS)
    logits = logits_of(count, device)
    asked = [RowSampling(SAMPLINGS[i % len(SAMPLINGS)], 10 + i) for i in range(count)]
    got = next_tokens(logits, asked, limit).tolist()
    for i, one in enumerate(asked):
        row = Distributions(logits[i, :limit].cpu(), one.sampling).array(0)
        if one.sampling.greedy:
            assert got[i] == row.argmax()
        else:
            assert got[i] == noise.race(row, noise.exponential(one.sampling.seed, one.position, len(row)))
    assert len(set(got)) > count // 2


def test_neighbours_do_not_matter(device: str) -> None:
    logits = logits_of(40, device, 1)
    asked = [RowSampling(SAMPLINGS[i % len(SAMPLINGS)], i // 3) for i in range(40)]
    together = next_tokens(logits, asked)
    assert together.tolist() == [int(next_tokens(logits[i : i + 1], asked[i : i + 1])) for i in range(40)]


def test_logits_that_are_no_numbers_and_masked_tokens(device: str) -> None:
    logits = logits_of(6, device, 2)
    logits[0, 5], logits[1, 6], logits[2, :], logits[3, 7:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[4, 900] = torch.nan  # behind the limit, and still no number
    for way in (ARGMAX, RowSampling(Sampling(temperature=1.0, seed=1), 0)):
        found = next_tokens(logits, [way] * 6, 800).tolist()
        assert found[:3] == [NON_FINITE] * 3 and found[4] == NON_FINITE and 0 <= found[3] < 7 and found[5] >= 0


def test_equal_logits_give_the_first(device: str) -> None:
    logits = torch.zeros(2, 50, device=device)
    logits[1, [9, 30]] = 1.0
    assert next_tokens(logits, [ARGMAX] * 2).tolist() == [0, 9]


@pytest.mark.parametrize("limit", [VOCABULARY, 700])
def test_candidates_are_those_of_the_cpu(device: str, limit: int) -> None:
    count = 5 * len(SAMPLINGS)
    logits = logits_of(count, device, 3)
    asked = [RowSampling(SAMPLINGS[i % len(SAMPLINGS)], 10 + i) for i in range(count)]
    for one, row, got in zip(asked, logits.cpu(), candidates(logits, asked, 4, limit), strict=True):
        rows = Distributions(row[:limit], one.sampling)
        if one.sampling.greedy:
            want = ranked(softmax(rows.scores(0), 1.0, 0), 4)
        else:
            want = ranked(rows.array(0) / noise.exponential(one.sampling.seed, one.position, limit), 4)
        assert got is not None and got.tokens == want.tokens and got.row is None
        assert got.shares == pytest.approx(want.shares) and got.promises == got.shares


def test_candidates_of_equals_of_masked_rows_and_of_none(device: str) -> None:
    logits = torch.zeros(4, 50, device=device)
    logits[1, [9, 30, 40]] = 1.0
    logits[2, 2:], logits[3, 49] = -torch.inf, torch.nan
    first, second, third, fourth = candidates(logits, [ARGMAX] * 4, 3, 40)
    assert first is not None and first.tokens == [0, 1, 2]
    assert second is not None and second.tokens == [9, 30, 0]
    # Tokens of no probability are no candidates; what is behind the limit must still be a number.
    assert third is not None and third.tokens == [0, 1] and third.shares == [0.5, 0.5]
    assert fourth is None
    assert candidates(logits[:0], [], 3, 40) == []


def test_what_cannot_be_chosen_there_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="must be plain"):
        next_tokens(logits_of(1, device), [RowSampling(Sampling(repetition_penalty=1.2), 0)])
    assert next_tokens(logits_of(0, device), []).tolist() == []
