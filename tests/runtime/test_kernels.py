"""Packed layers against float64 arithmetic on the same codes, and their bits at every width."""

import pytest
import torch
from torch import Tensor

from runtime.formats.nf4 import INT8_LEVELS
from runtime.formats.packed import PackedWeight, Scheme
from runtime.kernels import reference
from runtime.kernels.dispatch import available, choose, join, linear

N, K = 96, 256


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def int8_weight(n: int = N, k: int = K) -> PackedWeight:
    codes = torch.randint(-127, 128, (n, k), generator=generator(1)).to(torch.int8)
    scale = torch.rand(n, 1, generator=generator(2)) * 0.01 + 0.001
    bias = torch.randn(n, generator=generator(3))
    return PackedWeight(Scheme("int8", 8, 0, True, "int8-token"), codes, scale, bias=bias)


def group_weight(kind: str, group: int, k: int = K, asymmetric: bool = False, permuted: bool = False) -> PackedWeight:
    low, high = (0, 16) if kind == "nf4" or asymmetric else (-8, 8)
    codes = torch.randint(low, high, (N, k), generator=generator(4)).to(torch.int8)
    groups = -(-k // group)
    scale = torch.rand(N, groups, generator=generator(5)) * 0.1 + 0.01
    offset = scale * torch.randint(0, 16, scale.shape, generator=generator(6)) if asymmetric else None
    perm = torch.randperm(k, generator=generator(7)) if permuted else None
    return PackedWeight(Scheme(kind, 4, group, not asymmetric, "int8-group"), codes, scale, offset, perm)  # type: ignore[arg-type]


def dense(weight: PackedWeight) -> Tensor:
    """The weight in float64, nf4 through its int8 levels as the kernels have it."""
    codes = INT8_LEVELS[weight.codes.long()].double() / 127 if weight.scheme.kind == "nf4" else weight.codes.double()
    group = weight.scheme.group_size or weight.shape[1]
    spread = weight.scale.double().repeat_interleave(group, dim=1)[:, : weight.shape[1]]
    value = codes * spread
    if weight.offset is not None:
        value = value - weight.offset.double().repeat_interleave(group, dim=1)[:, : weight.shape[1]]
    if weight.perm is not None:
        unpermuted = torch.empty_like(value)
        unpermuted[:, weight.perm] = value
        value = unpermuted
    return value


def rounded(x: Tensor, weight: PackedWeight) -> Tensor:
    """x as the kernels see it: int8 per token, or per token and group (in the weight's input order)."""
    k = weight.shape[1]
    ordered = x if weight.perm is None else x[:, weight.perm]
    group = weight.scheme.group_size or k
    padded = torch.nn.functional.pad(ordered, (0, -k % group)).view(len(x), -1, group).double()
    step = padded.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(step > 0, (padded / step.clamp(min=1e-300)).round(), torch.zeros_like(padded))
    out = (codes * step).flatten(1)[:, :k]
    if weight.perm is None:
        return out
    back = torch.empty_like(out)
    back[:, weight.perm] = out
    return back


CASES = {
    "int8": int8_weight(),
    "int8 odd": int8_weight(37, 100),
    "int4 g128": group_weight("int4", 128),
    "int4 g32": group_weight("int4", 32),
    "int4 ragged": group_weight("int4", 64, k=200),
    "int4 zero points": group_weight("int4", 64, asymmetric=True),
    "int4 activation order": group_weight("int4", 64, permuted=True),
    "nf4": group_weight("nf4", 64),
}


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    weight = CASES[name]
    x = torch.randn(19, weight.shape[1], generator=generator(8))
    want = rounded(x, weight) @ dense(weight).t()
    if weight.bias is not None:
        want = want + weight.bias
    got = reference.packed_linear(weight)(x).double()
    # A tie in the rounding of x can fall the other way in float32: one step of one input.
    assert (got - want).norm() / want.norm() < 1e-3
    assert (got - want).abs().median() / want.abs().median() < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_bits_at_every_width(name: str) -> None:
    weight = CASES[name]
    x = torch.randn(40, weight.shape[1], generator=generator(9))
    layer = reference.packed_linear(weight)
    whole = layer(x)
    for width in range(1, 17):
        for start in (0, 11):
            assert torch.equal(layer(x[start : start + width]), whole[start : start + width])


@pytest.mark.parametrize("name", ["int8", "int4 g128", "nf4"])
def test_extreme_inputs(name: str) -> None:
    layer, k = reference.packed_linear(CASES[name]), CASES[name].shape[1]
    bias = CASES[name].bias
    assert torch.equal(layer(torch.zeros(1, k))[0], torch.zeros(N) if bias is None else bias)
    huge = torch.randn(2, k, generator=generator(10)) * 1e30
    assert torch.isfinite(layer(huge)).all()
    tiny = torch.full((1, k), 1e-42)
    assert torch.isfinite(layer(tiny)).all()
    assert layer(torch.empty(0, k)).shape == (0, N)


def test_groups_too_large_for_an_exact_sum_are_refused() -> None:
    reference.packed_linear(group_weight("int4", 1024, k=1024))
    with pytest.raises(ValueError, match="exact"):
        reference.packed_linear(group_weight("int4", 2048, k=2048))


def test_joined_layers_equal_single_ones() -> None:
    kernel = choose("reference", "cpu")
    x = torch.randn(5, K, generator=generator(11))
    for pair in (
        [int8_weight(), int8_weight(64)],
        [group_weight("nf4", 64)] * 2,
        [int8_weight(), group_weight("int4", 64)],
    ):
        sizes = [w.shape[0] for w in pair]
        parts = join(pair, [None] * len(pair), sizes, kernel).split(x)
        for part, weight in zip(parts, pair, strict=True):
            assert torch.equal(part, linear(weight, None, kernel)(x))


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_bitsandbytes_kernels_agree(name: str) -> None:
    if not next(k for k in available() if k.name == "bitsandbytes").usable:
        pytest.skip("bitsandbytes is not installed")
    weight = CASES[name]
    x = torch.randn(6, K, generator=generator(12))
    got = linear(weight, None, choose("bitsandbytes", "cpu"))(x)
    want = linear(weight, None, choose("reference", "cpu"))(x)
    assert (got - want).norm() / want.norm() < 0.02


def test_attention_against_float64() -> None:
    tiles, heads, kv_heads, d = 2, 4, 2, 16
    q = torch.randn(tiles, reference.TILE, heads, d, generator=generator(13))
    keys, values = (torch.randn(1, 128, kv_heads, d, generator=generator(s)) for s in (14, 15))
    positions = torch.tensor([[3, 17, 63, 64, 65, 98, 99, 0], [99] * 8])

    def blocks(x: Tensor) -> Tensor:
        return x.view(1, 2, 64, kv_heads, d).transpose(2, 3).expand(tiles, -1, -1, -1, -1).contiguous()

    for window in (None, 20):
        got = reference.attention(q, blocks(keys), blocks(values), positions, d**-0.5, window)
        for tile in range(tiles):
            for row in range(reference.TILE):
                last = int(positions[tile, row])
                first = 0 if window is None else max(0, last - window + 1)
                for head in range(heads):
                    k, v = (x[0, first : last + 1, head // 2].double() for x in (keys, values))
                    odds = torch.softmax(k @ q[tile, row, head].double() * d**-0.5, 0)
                    assert torch.allclose(got[tile, row, head].double(), odds @ v, atol=1e-5)
