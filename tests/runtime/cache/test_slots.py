"""What every decoder of ours refuses, whichever kernels it runs on, and that a refusal leaves the cache alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import load
from runtime.cache.contiguous import ContiguousCache
from runtime.cache.quantizer import CacheFormat
from runtime.cache.slots import reserve
from runtime.contract import Rows


def test_arguments_are_refused_alike(tiny: Callable[..., Path], text: Callable[..., Tensor], kernels: str) -> None:
    made = load(tiny("llama"), kernels=kernels).decoder
    cache = made.new_cache()
    assert isinstance(cache, ContiguousCache)
    request = cache.open(64)
    three = Rows.chains([(request, 0, 3)])
    for tokens, at, message in (
        (text(2), None, "2 tokens for 3 rows"),
        (torch.tensor([1, 320, 1]), None, "token ids must lie in 0..319, found 1..320"),
        (torch.tensor([1, -1, 1]), None, "token ids must lie in 0..319, found -1..1"),
        (text(3).float(), None, "tokens must be integers"),
        (text(3) > 9, None, "tokens must be integers"),
        (text(3).view(3, 1), None, "tokens must be integers"),
        (text(3), torch.tensor([3]), "logits_at must lie in 0..2, found 3..3"),
        (text(3), torch.tensor([-1, 2]), "logits_at must lie in 0..2, found -1..2"),
        (text(3), torch.tensor([0.5]), "logits_at must be integers"),
    ):
        with pytest.raises(ValueError, match=message):
            made.forward(tokens, three, cache, at)
        assert cache.length(request) == 0
    with pytest.raises(TypeError, match="needs the cache of its new_cache"):
        made.forward(text(3), three, object())  # type: ignore[arg-type]
    for other in (
        ContiguousCache(CacheFormat(1, 2, 16, made.device)),
        ContiguousCache(CacheFormat(2, 2, 8, made.device)),
    ):
        with pytest.raises(ValueError, match="this cache is another model's"):
            made.forward(text(3), Rows.chains([(other.open(64), 0, 3)]), other)
    # The same numbers in another type, and in memory that is not contiguous, are taken.
    want = made.forward(text(3), three, cache).logits
    cache.truncate(request, 0)
    assert torch.equal(made.forward(text(3).int(), three, cache).logits, want)
    cache.truncate(request, 0)
    apart = text(3).repeat_interleave(2)[::2]
    assert torch.equal(made.forward(apart, three, cache, torch.tensor([2, 0], dtype=torch.int32)).logits, want[[2, 0]])


@pytest.mark.parametrize("written_out", [False, True])
def test_chains_take_slots_or_are_refused(written_out: bool) -> None:
    """Made of spans or row by row; a refusal takes nothing."""
    cache = ContiguousCache(CacheFormat(1, 1, 16, torch.device("cpu")))
    first, second = cache.open(64), cache.open(64)

    def rows(*spans: tuple[int, int, int]) -> Rows:
        made = Rows.chains(spans)
        return Rows(made.request, made.position, made.parent) if written_out else made

    found = reserve(rows((second, 0, 3), (first, 0, 2)), cache)
    assert [(of.request, of.first, of.count, of.start, of.parents) for of in found] == [
        (second, 0, 3, 0, None),
        (first, 3, 2, 0, None),
    ]
    with pytest.raises(ValueError, match="row 0 is at position 4, its parent's successor is 2"):
        reserve(rows((first, 4, 1)), cache)
    with pytest.raises(ValueError, match=f"rows of request {first} are not adjacent"):
        reserve(rows((first, 2, 1), (second, 3, 1), (first, 2, 1)), cache)
    with pytest.raises(ValueError, match=r"3 \+ 62 tokens do not fit a cache of 64"):
        reserve(rows((first, 2, 1), (second, 3, 62)), cache)
    with pytest.raises(ValueError, match="1 numbers of further slots for 2 requests"):
        reserve(rows((first, 2, 1), (second, 3, 1)), cache, [1])
    assert (cache.length(first), cache.length(second)) == (2, 3)
    reserve(rows((first, 2, 1), (second, 3, 1)), cache, [2, 0])
    assert (cache.length(first), cache.length(second)) == (5, 4)
