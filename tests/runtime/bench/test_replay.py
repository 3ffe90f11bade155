"""Replayed acceptance: at each position as often right as was asked, and the block drafter really runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import Speculator, load
from runtime.bench.replay import LENGTH, ReplayedDrafter, parse_rates, random_network
from runtime.engine.metrics import total
from runtime.errors import UserError
from runtime.speculative.drafters.block import BlockDrafter

Tiny = Callable[..., Path]


def test_positions_have_their_rates(tiny: Tiny) -> None:
    target = load(tiny("llama"))
    prompts = [[i, 7, 2 * i + 1] for i in range(16)]
    plain = Speculator(target).generate(prompts, 120, stop=())
    known = {tuple(prompt): result.tokens for prompt, result in zip(prompts, plain, strict=True)}
    block = BlockDrafter(random_network(target, scheme=""))
    drafter = ReplayedDrafter(block, known, (0.9, 0.6, 0.3), target.decoder.vocab_size)
    results = Speculator(target, drafter, 16).generate(prompts, 120, stop=())
    assert [result.tokens for result in results] == [result.tokens for result in plain]
    counts = total([result.metrics for result in results])
    assert len(counts.drafted_at) == LENGTH and not block._texts
    before = counts.drafted_at[0]
    for accepted, rate in zip(counts.accepted_at[:3], (0.9, 0.6, 0.3), strict=True):
        assert accepted / before == pytest.approx(rate, abs=0.06)
        before = accepted


def test_rates_that_are_none(tiny: Tiny) -> None:
    assert parse_rates("0.9,0.5") == (0.9, 0.5)
    with pytest.raises(UserError, match="expected numbers"):
        parse_rates("0.9,")
    block = BlockDrafter(random_network(load(tiny("llama")), scheme=""))
    for rates in ((), (1.5,)):
        with pytest.raises(UserError, match="from 0 to 1"):
            ReplayedDrafter(block, {}, rates, 9)
    with pytest.raises(UserError, match="own kernels"):
        random_network(load(tiny("gpt2")))
