"""Forwards that tell the most probable tokens alone: those of the logits, whatever the rows and the cache."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import load
from runtime.cache.tree_rows import Trees
from runtime.contract import GreedyRows, Rows, integers
from runtime.model.native import NativeDecoder

Tiny = Callable[..., Path]
TREE = [-1, 0, 0, 1, 1, 2, 5]


def rounds(handles: Sequence[int]) -> list[tuple[Rows, int, list[int] | None]]:
    """Rows of three requests, how many they are, and those whose logits are asked for: prompts, chains, a tree, all."""
    a, b, c = handles
    tree = Trees([(a, 15, 7), (b, 6, 1), (c, 71, 2)], [TREE, None, None])
    return [
        (Rows.chains([(a, 0, 9)]), 9, [8]),
        (Rows.chains([(b, 0, 5), (c, 0, 70)]), 75, [4, 60, 74]),
        (Rows.chains([(a, 9, 1)]), 1, None),
        (Rows.chains([(a, 10, 5)]), 5, None),
        (Rows.chains([(b, 5, 1), (c, 70, 1)]), 2, None),
        (tree, 10, None),
    ]


@pytest.mark.parametrize("kind", ["llama", "gemma", "mixtral"])
def test_tokens_and_states_are_those_of_the_whole_forward(tiny: Tiny, native_path: str, kind: str) -> None:
    decoder = load(tiny(kind), kernels=native_path).decoder
    assert isinstance(decoder, NativeDecoder) and isinstance(decoder, GreedyRows)
    view, draws = decoder.tapped((0, 1)), torch.Generator().manual_seed(3)
    caches = [decoder.new_cache(), decoder.new_cache()]
    handles = [[cache.open(96) for _ in range(3)] for cache in caches]
    for (rows, count, at), (others, _, _) in zip(*map(rounds, handles), strict=True):
        tokens = torch.randint(decoder.vocab_size, (count,), generator=draws)
        whole = view.forward(tokens, rows, caches[0], None if at is None else integers(at))
        found = view.forward_greedy(tokens.tolist(), others, caches[1], at)
        assert found.tokens == whole.logits.argmax(dim=-1).tolist()
        assert torch.equal(found.hidden, whole.hidden)
        assert found.taken is not None and whole.taken is not None and torch.equal(found.taken, whole.taken)


def test_logits_that_are_no_numbers_and_what_is_refused(tiny: Tiny, native_path: str) -> None:
    decoder = load(tiny("llama"), kernels=native_path).decoder
    assert isinstance(decoder, NativeDecoder)
    cache = decoder.new_cache()
    handle = cache.open(20)
    decoder.forward_greedy([1, 2, 3], Rows.chains([(handle, 0, 3)]), cache, [2])
    wrong: list[tuple[Any, ...]] = [([decoder.vocab_size], None), ([-1], None), ([1, 2], None), ([1], [1]), ([1], [-1])]
    for tokens, at in wrong:
        with pytest.raises(ValueError, match=r"token|logits_at"):
            decoder.forward_greedy(tokens, Rows.chains([(handle, 3, 1)]), cache, at)
        assert cache.length(handle) == 3
    assert decoder.forward_greedy([1], Rows.chains([(handle, 3, 1)]), cache, []).tokens == []
    norm = decoder.parts.norm.weight
    before = copy.deepcopy(norm)
    norm[3] = torch.nan
    assert decoder.forward_greedy([1, 2], Rows.chains([(handle, 4, 2)]), cache).tokens == [-1, -1]
    norm.copy_(before)
    cache.truncate(handle, 4)
    assert min(decoder.forward_greedy([1, 2], Rows.chains([(handle, 4, 2)]), cache).tokens) >= 0
