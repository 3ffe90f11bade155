"""Mixtures of experts: the reference's bits at every width, and nothing that the host would have to wait for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runtime import Speculator, load
from runtime.contract import Rows
from runtime.model.layers import Mixture
from runtime.model.reference import LlamaDecoder
from runtime.model.triton import layers
from runtime.model.triton.cache import WIDEST
from runtime.model.triton.decoder import TritonDecoder
from runtime.model.triton.graphs import Graphs
from runtime.speculative.drafters.model import ModelDrafter
from tests.slices import often

Tiny = Callable[..., Path]
Packed = Callable[..., Path]
Text = Callable[..., Tensor]
# Zero points, orders, static inputs and fp8, which no file of ours has of experts, are in test_experts.py.
PACKED = ("int8", "int4", "nf4", "ternary")
MIXTURES = (*(("qwen3_moe", scheme) for scheme in PACKED), ("mixtral", "int4"), ("mixtral", "float"))
CHANGES = {"num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


def decoder(path: Path, device: str, **options: bool) -> TritonDecoder:
    made = load(path, device=device, kernels="triton", **options).decoder
    assert isinstance(made, TritonDecoder)
    return made


def mixture(made: TritonDecoder | LlamaDecoder) -> Mixture:
    [block] = made.parts.blocks
    assert isinstance(block.mlp, Mixture)
    return block.mlp


class NoReads(TorchDispatchMode):
    """Refuses what reads a number of the device."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique"), name
        return operation(*args, **(kwargs or {}))


def ours(made: TritonDecoder, weights: Mixture, x: Tensor) -> Tensor:
    """What the mixture makes of x (T, hidden), read as it is."""
    position = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    return layers._mix(x, x, weights, made.architecture, position).cpu()


@pytest.mark.parametrize("case", often(MIXTURES, ("qwen3_moe", "int4"), ("mixtral", "float")), ids="-".join)
def test_has_the_references_bits_at_every_width(
    tiny: Tiny, tiny_packed: Packed, device: str, case: tuple[str, str]
) -> None:
    model, scheme = case
    path = tiny(model, **CHANGES) if scheme == "float" else tiny_packed(scheme, model, **CHANGES)
    made, plain = decoder(path, device), load(path, kernels="reference").decoder
    assert isinstance(plain, LlamaDecoder)
    theirs = mixture(plain)
    # Float products add in orders of their own, so the router is the reference's.
    weights = replace(mixture(made), router=lambda x: theirs.router(x.cpu()).to(device))
    assert weights.stacked is not None
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    want, got = x + plain._mix(x, x, theirs), ours(made, weights, x.to(device))
    if scheme == "float":
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(got, want)
    # On both sides of every size of a tile; what differs is tested with the kernels.
    for width in (1, 2, 3, 5, 8, 9, 15) if model == "mixtral" else (1, 9):
        assert torch.equal(ours(made, weights, x[-width:].to(device)), got[-width:]), width


@pytest.mark.parametrize("scheme", often(["int8", "int4"], "int8"))
def test_prompts_go_another_way_to_the_same_bits(tiny_packed: Packed, device: str, scheme: str) -> None:
    made = decoder(tiny_packed(scheme, "qwen3_moe", **CHANGES), device)
    weights = mixture(made)
    x = torch.randn(WIDEST + 6, 64, generator=torch.Generator().manual_seed(2)).to(device)
    a = made.architecture
    assert layers.waits(made.parts, len(x), a) and not layers.waits(made.parts, WIDEST, a)
    whole = ours(made, weights, x)
    assert torch.equal(ours(made, replace(weights, stacked=None), x[:20]), whole[:20])
    assert torch.equal(ours(made, weights, x[:20]), whole[:20])


@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_narrow_forwards_can_be_graphs(
    tiny: Tiny, text: Text, device: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding, verifying and drafting: one run of a graph each, in which nothing is read."""
    made = decoder(tiny(model, **CHANGES), device)
    ran = []
    run = Graphs.run

    @contextmanager
    def unread() -> Iterator[None]:
        with NoReads():
            yield

    def watched(self: Graphs, pool: Any, shape: Any, forward: Callable[[], Any]) -> Any:
        ran.append(shape.captured)

        def body() -> Any:
            with unread():
                return forward()

        return run(self, pool, shape, body)

    monkeypatch.setattr(Graphs, "run", watched)
    cache = made.new_cache()
    request = cache.open(20)
    tokens = text(6)
    whole = made.forward(tokens, Rows.chains([(request, 0, 6)]), cache).logits
    cache.truncate(request, 5)
    assert torch.equal(made.forward(tokens[5:], Rows.chains([(request, 5, 1)]), cache).logits, whole[5:])
    cache.truncate(request, 5)
    drafted = made.draft(tokens[5:], Rows.chains([(request, 5, 1)]), cache, [2], made.vocab_size)
    assert drafted[0, 0] == whole[5].argmax()
    assert ran == [True] * 3


def test_texts_of_a_mixture(tiny_packed: Packed, device: str) -> None:
    """Greedy speculation leaves them as they are; the nested draft reads upper planes of the same stacks."""
    path = tiny_packed("int8", "qwen3_moe", **CHANGES)
    target = load(path, device=device, kernels="triton", planes=True)
    assert isinstance(target.decoder, TritonDecoder)
    upper = target.decoder.upper()
    stacked = mixture(upper).stacked
    assert isinstance(stacked, layers.StackedExperts)
    assert stacked.down.layer.weight.kind == "upper"
    plain = load(path, kernels="reference")
    want = Speculator(plain, None).generate([[7, 300, 12]], 4, stop=())[0].tokens
    found = Speculator(target, None).generate([[7, 300, 12]], 4, stop=())[0].tokens
    draft = load(path, device=device, kernels="triton")
    assert Speculator(target, ModelDrafter(draft), 3).generate([[7, 300, 12]], 4, stop=())[0].tokens == found
    assert found == want
    assert target.decoder.weight_bytes >= upper.weight_bytes
