"""Layers to train: they stand for what they were made of, change when trained, and pack as what they computed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from compress.learn.layers import LearnedGrid, LearnedLinear, LearnedTrellis, learned
from compress.quantize import rtn
from runtime import native
from runtime.formats import dequantize, nf4
from runtime.formats.packed import PackedWeight
from runtime.kernels import reference

SCHEMES = [("int4", 32, True), ("int3", 64, False), ("int2", 32, True), ("int6", 32, False), ("int8-dynamic", 0, True)]


def random(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5


def made(scheme: str, group: int, symmetric: bool, rounding: bool = True) -> tuple[LearnedLinear, PackedWeight, Tensor]:
    weight = random(24, 192)
    packed = rtn.quantize(weight, scheme, group, symmetric=symmetric)
    return learned(packed, None, torch.bfloat16, weight if rounding else None, 1), packed, weight


def train(layer: LearnedLinear, weight: Tensor, steps: int = 25, rate: float = 0.02) -> tuple[float, float]:
    """Outputs' squared error at random inputs, before and after some steps towards `weight`."""
    x = random(128, weight.shape[1], 1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=rate, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (layer(x) - x @ weight.T).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[0], losses[-1]


@pytest.mark.parametrize(("scheme", "group", "symmetric"), SCHEMES)
def test_untrained_a_layer_is_what_it_was(scheme: str, group: int, symmetric: bool) -> None:
    layer, packed, _ = made(scheme, group, symmetric)
    again = layer.packed()
    assert torch.equal(again.codes, packed.codes) and torch.equal(again.scale, packed.scale)
    assert torch.equal(dequantize(again), dequantize(packed))
    assert torch.equal(layer.weight.detach(), dequantize(packed))


@pytest.mark.parametrize(("scheme", "group", "symmetric"), SCHEMES[:3])
def test_training_helps_and_packs_as_computed(scheme: str, group: int, symmetric: bool) -> None:
    layer, packed, weight = made(scheme, group, symmetric)
    # A step that suits codes of a few bits is far too large for those of eight.
    before, after = train(layer, weight, rate=0.16 / 4**packed.scheme.bits)
    assert after < before
    new = layer.packed()
    assert not torch.equal(new.scale, packed.scale)
    assert torch.equal(new.scale, new.scale.bfloat16().float())
    assert (new.codes - packed.codes).abs().max() <= 1
    half = 1 << packed.scheme.bits - 1
    assert -half <= int(new.codes.min()) and int(new.codes.max()) < half
    x = random(7, 192, 3)
    wanted = reference.packed_linear(new)(x)
    assert float((layer(x).detach() - wanted).norm() / wanted.norm()) < 1e-5


def test_codes_move_only_where_they_may() -> None:
    moving, packed, weight = made("int2", 32, True)
    still, *_ = made("int2", 32, True, rounding=False)
    assert train(moving, weight)[1] < train(still, weight)[1]
    assert isinstance(moving, LearnedGrid) and isinstance(still, LearnedGrid)
    assert not torch.equal(moving.packed().codes, packed.codes)
    assert still.place is None and torch.equal(still.packed().codes, packed.codes)
    assert moving.place is not None
    with torch.no_grad():
        moving.place.fill_(9.0)
    assert torch.equal(moving.packed().codes, (packed.codes + 1).clamp(max=1))


def test_codes_that_are_not_the_nearest_stay_until_trained() -> None:
    """GPTQ rounds many weights away from their nearest code."""
    weight = random(8, 64)
    packed = rtn.quantize(weight, "int4", 32)
    other = replace(packed, codes=(packed.codes + torch.randint(-1, 2, packed.codes.shape)).clamp(-8, 7).to(torch.int8))
    layer = learned(other, None, torch.bfloat16, weight, 1)
    assert torch.equal(layer.packed().codes, other.codes) and not torch.equal(other.codes, packed.codes)


@pytest.mark.skipif(not native.usable("portable")[0], reason=native.usable("portable")[1])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_trellis_keeps_its_sequences_and_learns_its_levels(bits: int) -> None:
    weight = random(24, 40)
    packed = rtn.quantize(weight, f"trellis-{bits}", 0)
    layer = learned(packed, None, torch.bfloat16, weight, 1)
    assert isinstance(layer, LearnedTrellis)
    assert torch.equal(layer.packed().codes, packed.codes)
    before, after = train(layer, weight, rate=0.01)
    new = layer.packed()
    assert after < before and new.tiles is not None and packed.tiles is not None
    assert torch.equal(new.tiles.sequences, packed.tiles.sequences)
    assert not torch.equal(new.tiles.levels, packed.tiles.levels)
    assert int(new.tiles.levels.min()) >= -127
    x = random(5, 40, 3)
    wanted = reference.packed_linear(new)(x)
    assert float((layer(x).detach() - wanted).norm() / wanted.norm()) < 1e-5


def test_other_layers_are_refused() -> None:
    packed = rtn.quantize(random(32, 64), "int4", 32)
    with pytest.raises(ValueError, match="input order"):
        learned(replace(packed, perm=torch.randperm(64)), None, torch.bfloat16, None, 1)
    with pytest.raises(ValueError, match="found nf4"):
        learned(nf4.pack(random(32, 64)), None, torch.bfloat16, None, 1)
    bias = nn.Parameter(torch.ones(32))
    assert torch.equal(learned(packed, bias, torch.bfloat16, None, 1)(torch.zeros(2, 64)).detach(), torch.ones(2, 32))
