"""Forwards as graphs: the bits of eager ones, no waiting in between. On a GPU only: elsewhere nothing is captured."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import load
from runtime.contract import Rows, integers
from runtime.model.triton.decoder import TritonDecoder
from runtime.model.triton.graphs import Graphs
from runtime.sampling.params import Sampling
from tests.runtime.model.families import FAMILIES, write

Tiny = Callable[..., Path]
Text = Callable[..., Tensor]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's")


def decoder(path: Path, capture: bool = True) -> TritonDecoder:
    made = load(path, device="cuda", kernels="triton").decoder
    assert isinstance(made, TritonDecoder)
    if not capture:
        made._graphs._memory = None
    return made


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("qwen3", "float32"), ("qwen3", "int8"), ("qwen3", "int4"), ("qwen3_moe", "float32")),
        *(("gemma2", "float32"), ("gpt_oss", "int8"), ("deepseek_v3", "int4"), ("gemma4_text", "float16")),
    ],
)
def test_replays_have_the_bits_of_eager_forwards(tiny: Tiny, text: Text, tmp_path: Path, model: str, kind: str) -> None:
    tokens = text(60)
    path = write(model, tmp_path / model) if model in FAMILIES else tiny(model)
    out = []
    for capture in (True, False):
        made = decoder(path, capture)
        cache = made.new_cache(kind)  # type: ignore[arg-type]
        request = cache.open(200)
        made.forward(tokens, Rows.chains([(request, 0, 60)]), cache, integers([]))
        found = []
        # The first round of a width is eager, the second captures, the others replay; then the pool moves.
        for turn in range(5):
            for width in (1, 2, 5, 7, 16, 64):
                more = text(width, seed=width)
                logits = made.forward(more, Rows.chains([(request, 60, width)]), cache).logits
                found.append(logits)
                cache.truncate(request, 60)
            if turn == 3:
                before = cache.memory
                others = [cache.open(250) for _ in range(4)]
                assert cache.memory is not before
                cache.close(others[0])
        out.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*out, strict=True))


@pytest.mark.parametrize("model", ["qwen3", "mixtral"])
@pytest.mark.parametrize("way", [Sampling(), Sampling(temperature=0.9, top_k=100, top_p=0.95, min_p=0.01)])
def test_replayed_rounds_are_eager_ones(tiny: Tiny, text: Text, way: Sampling, model: str) -> None:
    """Requests that draft less than others, and whose keys and noise change from round to round."""
    out = []
    for capture in (True, False):
        made = decoder(tiny(model), capture)
        cache = made.new_cache("int8")
        handles = [cache.open(200) for _ in range(3)]
        made.forward(text(90), Rows.chains([(handle, 0, 30) for handle in handles]), cache, integers([]))
        found = []
        for turn in range(6):
            pieces, steps = [(1, 2, 1), (2, 1, 1)][turn % 2], [(4, 2, 1), (1, 4, 4)][turn % 2]
            ways = [replace(way, seed=turn + i) for i in range(3)]
            rows = Rows.chains([(h, cache.length(h), n) for h, n in zip(handles, pieces, strict=True)])
            drafted = made.draft(text(4, seed=turn), rows, cache, steps, 311, ways)
            found += [drafted[i, :count] for i, count in enumerate(steps)]
        if capture:
            [kept] = made._graphs._of.values()
            assert len([held for held in kept.values() if held is not None]) == 1
        # The keys of what was drafted are those of eager steps.
        more = Rows.chains([(h, cache.length(h), 1) for h in handles])
        found.append(made.forward(text(3, seed=99), more, cache).logits)
        out.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*out, strict=True))


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_nothing_waits_but_what_says_so(tiny: Tiny, text: Text, model: str) -> None:
    made = decoder(tiny(model))
    cache = made.new_cache()
    request = cache.open(200)
    made.forward(text(30), Rows.chains([(request, 0, 30)]), cache, integers([]))
    for turn in range(4):
        if turn == 3:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            for way in (Sampling(), Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=3)):
                drafted = made.draft(text(2), Rows.chains([(request, 30, 2)]), cache, [4], 320, [way])
                cache.truncate(request, 30)
            rows = Rows.chains([(request, 30, 6)])
            tokens = torch.cat((text(2), torch.zeros(4, dtype=torch.int64)))
            made.forward_drafted(tokens, rows, cache, integers([1, 2, 3, 4, 5]), drafted.flatten(), [2, 3, 4, 5])
            cache.truncate(request, 30)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_graphs_of_a_pool_go_with_it(tiny: Tiny, text: Text) -> None:
    made = decoder(tiny("llama"))
    made._graphs = Graphs(made.device, most=2)
    cache = made.new_cache()
    request = cache.open(100)
    for width in (1, 2, 3, 1, 2, 3):
        made.forward(text(width), Rows.chains([(request, 0, width)]), cache)
        cache.truncate(request, 0)
    [kept] = made._graphs._of.values()
    assert len(kept) == 2
    del cache
    assert not made._graphs._of
