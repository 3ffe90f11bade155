"""Every family in the table on Triton's kernels: near the reference, the same bits at other widths, or refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import load
from runtime.contract import CacheKind, Decoder, Rows, integers
from runtime.model.base import BaseDecoder
from runtime.model.layers import Mixture
from runtime.model.triton import latent, layers
from runtime.model.triton.batch import Shape
from runtime.model.triton.decoder import TritonDecoder
from runtime.model.triton.graphs import Graphs
from tests.runtime.model.families import FAMILIES, WINDOW, pack, write
from tests.runtime.model.triton.test_experts import NoReads
from tests.slices import often

# What attention has of its own: capped scores, sinks, latent vectors, keys of several shapes.
ATTENTION = ("gemma2", "vaultgemma", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "gemma4_text")
# Heads of 8191 outputs, and of one attention head after the other, are most of what the interpreter has to do.
TOKENS = 300
_FEW = {"vocab_size": TOKENS, "vocab_size_per_layer_input": TOKENS}
_SMALL = {"youtu": {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}}
CACHES: tuple[CacheKind, ...] = ("float32", "float16", "int8", "int4")


def run(decoder: Decoder, tokens: Tensor, width: int) -> Tensor:
    assert isinstance(decoder, BaseDecoder)
    cache = decoder.new_cache()
    request, found = cache.open(len(tokens)), []
    for start in range(0, len(tokens), width):
        piece = tokens[start : start + width]
        found.append(decoder.forward(piece, Rows.chains([(request, start, len(piece))]), cache).logits)
    return torch.cat(found)


@pytest.mark.parametrize("kind", often(list(FAMILIES), "gpt_oss"))
def test_a_family(tmp_path: Path, device: str, kind: str) -> None:
    """1e-5 of the logits' norm, as for the first families."""
    path = write(kind, tmp_path / kind, **_FEW)
    tokens = torch.randint(1, TOKENS, (WINDOW + 3 if device == "cuda" else 5,), generator=torch.manual_seed(1))
    decoder = load(path, device=device, kernels="triton").decoder
    whole = run(decoder, tokens, len(tokens))
    want = run(load(path, kernels="reference").decoder, tokens, len(tokens))
    assert float((whole.cpu() - want).norm() / want.norm()) < 1e-5
    assert torch.equal(run(decoder, tokens, 3), whole)


@pytest.mark.parametrize(
    "case",
    often([(kind, cached) for kind in ATTENTION for cached in CACHES], ("youtu", "int8")),
    ids="-".join,
)
def test_trees_and_batches_of_attention(tmp_path: Path, device: str, case: tuple[str, CacheKind]) -> None:
    """In every cache: rows of a tree beside another text have the bits of their chains, and so has what is kept."""
    kind, cached = case
    decoder = load(
        write(kind, tmp_path / kind, **_FEW, **_SMALL.get(kind, {})), device=device, kernels="triton"
    ).decoder
    assert isinstance(decoder, BaseDecoder)
    before = WINDOW + 13 if device == "cuda" else 2
    tokens = torch.randint(1, TOKENS, (before + 7,), generator=torch.manual_seed(2))
    cache = decoder.new_cache(cached, pages=6)
    first, second = cache.open(before + 6), cache.open(2)
    decoder.forward(tokens[:before], Rows.chains([(first, 0, before)]), cache, integers([]))
    alone = cache.fork(first)
    tree = Rows(
        integers([first] * 4 + [second] * 2),
        integers([before + at for at in (0, 1, 1, 2)] + [0, 1]),
        integers([-1, 0, 0, 2, -1, 4]),
    )
    found = decoder.forward(tokens[before : before + 6], tree, cache).logits
    path, more = [0, 2, 3], tokens[-1:]
    chain = torch.cat((tokens[before : before + 4][path], more))
    want = decoder.forward(chain, Rows.chains([(alone, before, 4)]), cache).logits
    assert torch.equal(found[path], want[:3])
    cache.keep(first, before, path)
    assert torch.equal(decoder.forward(more, Rows.chains([(first, before + 3, 1)]), cache).logits, want[3:])
    cache.truncate(second, 0)
    both = decoder.forward(tokens[before + 4 : before + 6], Rows.chains([(second, 0, 2)]), cache).logits
    assert torch.equal(both, found[4:])


@pytest.mark.parametrize("kind", often(["youtu", "deepseek_v2", "gpt_oss", "gemma4_text"], "youtu"))
def test_packed_layers_of_attention(tmp_path: Path, device: str, kind: str) -> None:
    """As packed models of other families: a code may fall to the other side of a rounding."""
    path, _ = pack(write(kind, tmp_path / kind, **_FEW, **_SMALL.get(kind, {})), tmp_path, "int4")
    tokens = torch.randint(1, TOKENS, (5,), generator=torch.manual_seed(1))
    decoder = load(path, device=device, kernels="triton").decoder
    whole = run(decoder, tokens, 5)
    want = run(load(path, kernels="reference").decoder, tokens, 5)
    assert float((whole.cpu() - want).norm() / want.norm()) < 1e-2
    assert torch.equal(run(decoder, tokens, 2), whole)


def test_layers_of_heads_are_one_stack(tmp_path: Path, device: str) -> None:
    """The bits of layer after layer, which prompts go through; nothing is held twice."""
    decoder = load(write("youtu", tmp_path / "youtu", **_FEW), device=device, kernels="triton").decoder
    assert isinstance(decoder, TritonDecoder)
    weights = decoder.parts.blocks[0].attention
    assert isinstance(weights, layers.Attention) and weights.latent is not None
    x = torch.randn(9, 5, 24, generator=torch.manual_seed(3)).to(device)
    stack = weights.latent.keys_stack
    assert stack is not None and weights.latent.values_stack is not None
    found = latent.by_head(weights.latent.keys, stack, x)
    assert found.shape == (9, 5, 70) and torch.equal(found, latent.by_head(weights.latent.keys, None, x))
    assert torch.equal(latent.by_head(weights.latent.keys, stack, x[4:5]), found[4:5])
    first, second = (layer.tensors[0] for layer in weights.latent.keys[:2])
    assert second.data_ptr() == first.data_ptr() + first.nbytes


def test_experts_with_parameters_are_stacks(tmp_path: Path, device: str) -> None:
    """gpt-oss's: forwards that decode do not wait, and have the bits of expert after expert."""
    decoder = load(write("gpt_oss", tmp_path / "gpt_oss", **_FEW), device=device, kernels="triton").decoder
    assert isinstance(decoder, TritonDecoder) and not layers.waits(decoder.parts, 64, decoder.architecture)
    weights = decoder.parts.blocks[1].mlp
    assert isinstance(weights, Mixture) and weights.stacked is not None
    x = torch.randn(5, 60, generator=torch.manual_seed(4)).to(device)
    position = torch.zeros(5, dtype=torch.int32, device=device)
    found = layers._mix(x, x, weights, decoder.architecture, position)
    assert torch.equal(found, layers._mix(x, x, replace(weights, stacked=None), decoder.architecture, position))
    assert torch.equal(found[3:4], layers._mix(x[3:4], x[3:4], weights, decoder.architecture, position[3:4]))


@pytest.mark.parametrize("kind", often(ATTENTION, "youtu"))
def test_nothing_is_read_within_a_forward(
    tmp_path: Path, device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that graphs can hold it: neither in a forward nor in a draft."""
    decoder = load(
        write(kind, tmp_path / kind, **_FEW, **_SMALL.get(kind, {})), device=device, kernels="triton"
    ).decoder
    assert isinstance(decoder, TritonDecoder)
    ran: list[bool] = []

    def unread(_: Graphs, pool: object, shape: Shape, forward: Callable[[], object]) -> object:
        ran.append(shape.captured)
        with NoReads():
            return forward()

    monkeypatch.setattr(Graphs, "run", unread)
    cache = decoder.new_cache()
    request, tokens = cache.open(6), integers([5, 7])
    whole = decoder.forward(tokens, Rows.chains([(request, 0, 2)]), cache).logits
    cache.truncate(request, 1)
    drafted = decoder.draft(tokens[1:], Rows.chains([(request, 1, 1)]), cache, [1], TOKENS)
    assert drafted[0, 0] == whole[1].argmax() and ran == [True] * 2
