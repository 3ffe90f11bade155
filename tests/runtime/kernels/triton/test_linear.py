"""Packed layers in Triton: the bits of reference.py on a CPU, at every width, for every scheme and odd shapes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.formats.packed import PackedWeight
from runtime.kernels.exact import ordered_sum
from runtime.kernels.reference import Int8Linear, UpperLinear, packed_linear

pytest.importorskip("triton")

from runtime.kernels.triton.linear import TritonLinear, triton_linear
from runtime.kernels.triton.weights import gpu_weight

Packed = Callable[..., PackedWeight]
WIDTHS = (1, 2, 5, 16, 17, 40, 70)
# Kind, outputs, inputs, group, and the rest: odd sizes, groups that do not divide the inputs or any chunk.
CASES = {
    "int8": ("int8", 37, 200, 0, {"bias": True}),
    "int8 static": ("int8", 37, 131, 0, {"static": True}),
    "int8 groups": ("int8", 21, 200, 64, {"offset": True, "bias": True}),
    "int8 zero points": ("int8", 65, 200, 0, {"offset": True}),
    "int4 g32": ("int4", 37, 200, 32, {}),
    "int4 g128": ("int4", 70, 300, 128, {"offset": True, "unsigned": True, "perm": True, "bias": True}),
    "int4 g96": ("int4", 20, 500, 96, {"offset": True, "perm": True}),
    "int4 g20": ("int4", 20, 90, 20, {"bias": True}),
    "int4 g200 static": ("int4", 20, 600, 200, {"static": True}),
    "int4 rows": ("int4", 33, 300, 0, {"offset": True}),
    "int6": ("int6", 20, 130, 64, {"bits": 6}),
    "int5": ("int6", 20, 130, 64, {"bits": 5, "offset": True, "perm": True}),
    "int3": ("int4", 20, 130, 64, {"bits": 3}),
    "int2": ("int4", 20, 130, 64, {"bits": 2, "offset": True}),
    "nf4": ("nf4", 37, 192, 64, {"bias": True}),
    "ternary": ("ternary", 37, 300, 0, {}),
    "ternary groups": ("ternary", 37, 600, 256, {}),
    "ternary-1.25": ("ternary-1.25", 37, 302, 0, {}),
    "planes": ("int8", 37, 200, 0, {"planes": True, "bias": True}),
    "planes in groups": ("int8", 37, 200, 64, {"planes": True}),
}


def made(packed: Packed, name: str) -> PackedWeight:
    kind, n, k, group, rest = CASES[name]
    return packed(kind, n, k, group, **rest)  # type: ignore[arg-type]


def layer(weight: PackedWeight, device: torch.device, splits: int | None = None) -> TritonLinear:
    return triton_linear(gpu_weight(weight, None, device), splits=splits)


def inputs(rows: int, k: int, seed: int = 1) -> Tensor:
    """Random rows, some of them with large values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, k, generator=generator) * (1 + 20 * (torch.rand(rows, 1, generator=generator) > 0.8))


@pytest.mark.parametrize("name", CASES)
def test_has_the_bits_of_the_reference_at_every_width(name: str, packed: Packed, device: torch.device) -> None:
    weight = made(packed, name)
    x = inputs(max(WIDTHS), weight.shape[1])
    expected, mine = packed_linear(weight)(x), layer(weight, device)
    assert expected.abs().sum() > 0
    for width in WIDTHS:
        found = mine(x[:width].to(device)).cpu()
        assert torch.equal(found, expected[:width]), f"{name} at width {width}"


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.sampled_from(["int8", "int4", "nf4", "ternary"]),
    st.integers(1, 70),
    st.integers(1, 300),
    st.sampled_from([0, 1, 16, 32, 48, 64, 100, 128, 512]),
    st.booleans(),
    st.integers(1, 17),
)
def test_any_shape(
    packed: Packed, device: torch.device, kind: str, n: int, k: int, group: int, offset: bool, rows: int
) -> None:
    # Ternary has no zero points, and groups of single inputs cost the interpreter too much.
    weight = packed(kind, n, min(k, 20) if group == 1 else k, group, offset=offset and kind != "ternary", perm=offset)
    x = inputs(rows, weight.shape[1])
    assert torch.equal(layer(weight, device)(x.to(device)).cpu(), packed_linear(weight)(x))


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("name", ["int4 g32", "int4 g128", "int4 g96", "nf4", "planes in groups"])
def test_splits_are_sums_of_groups_added_in_order(name: str, splits: int, packed: Packed, device: torch.device) -> None:
    weight = made(packed, name)
    x = inputs(70, weight.shape[1])
    mine = layer(weight, device, splits=splits)
    expected = in_splits(mine, weight, x)
    # Each warp has a split, or all are one program's, which has more rows: a matter of speed alone.
    for rows in (3, 18, 70):
        assert torch.equal(mine(x[:rows].to(device)).cpu(), expected[:rows])


def in_splits(layer: TritonLinear, weight: PackedWeight, x: Tensor) -> Tensor:
    """What a layer must make of x (T, K): the reference's products of the layer's splits of a weight in groups, added
    in order."""
    cut = layer.weight.cut
    assert cut is not None
    per_round = cut.per_byte if cut.units == 0 else 1
    per_split = -(-(cut.columns // per_round) // layer.splits) * per_round
    expected = ordered_sum(torch.stack([*_splits(weight, x, per_split)]))
    return expected if weight.bias is None else expected + weight.bias


def _splits(weight: PackedWeight, x: Tensor, groups: int) -> list[Tensor]:
    size = weight.scheme.group_size
    if weight.perm is not None:
        x = x[:, weight.perm]
    parts = []
    for first in range(0, weight.scale.shape[1], groups):
        span, some = slice(first * size, (first + groups) * size), slice(first, first + groups)
        offset = None if weight.offset is None else weight.offset[:, some]
        cut = replace(
            weight, codes=weight.codes[:, span], scale=weight.scale[:, some], offset=offset, perm=None, bias=None
        )
        parts.append(packed_linear(cut)(x[:, span]))
    return parts


@pytest.mark.parametrize("name", ["int8", "int4 rows", "ternary", "planes"])
def test_rows_may_be_split_anywhere(name: str, packed: Packed, device: torch.device) -> None:
    kind, n, _, group, rest = CASES[name]
    weight = packed(kind, n, 1100, group, **rest)  # type: ignore[arg-type]
    x = inputs(3, 1100)
    expected = packed_linear(weight)(x)
    assert layer(weight, device).splits == 4
    for splits in (1, 2, 4):
        assert torch.equal(layer(weight, device, splits=splits)(x.to(device)).cpu(), expected)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("name", ["int8", "int4 g128"])
def test_adds_a_residual_and_writes_where_it_is_told(
    name: str, splits: int, packed: Packed, device: torch.device
) -> None:
    weight = made(packed, name)
    x, residual = inputs(5, weight.shape[1]), inputs(5, weight.shape[0], seed=2)
    mine = layer(weight, device, splits=splits)
    stream = residual.clone().to(device)
    plain = mine(x.to(device))
    found = mine.product(mine.round(x.to(device)), out=stream, residual=stream)
    assert found is stream
    assert torch.equal(stream.cpu(), plain.cpu() + residual)


@pytest.mark.parametrize("grouped", [False, True])
def test_the_upper_plane(grouped: bool, packed: Packed, device: torch.device) -> None:
    weight = packed("int8", 37, 200, 64 if grouped else 0, planes=True, bias=True)
    x = inputs(6, 200)
    upper = layer(weight, device).upper()
    if grouped:
        expected = packed_linear(replace(weight, codes=(weight.codes >> 4) * 16 + 8, planes=False))(x)
    else:
        whole = packed_linear(weight)
        assert isinstance(whole, Int8Linear)
        expected = UpperLinear(whole)(x)
    assert torch.equal(upper(x.to(device)).cpu(), expected)
    assert upper.nbytes < layer(weight, device).nbytes
    with pytest.raises(ValueError, match="planes"):
        upper.upper()


def test_a_nan_reaches_the_output(packed: Packed, device: torch.device) -> None:
    for name in ("int8", "int8 static", "int4 g32"):
        weight = made(packed, name)
        x = inputs(3, weight.shape[1])
        x[1, 7] = torch.nan
        y = layer(weight, device)(x.to(device)).cpu()
        assert y[1].isnan().all()
        assert y[[0, 2]].isfinite().all()


def test_refuses_what_does_not_fit(packed: Packed, device: torch.device) -> None:
    weight = made(packed, "int8")
    mine, other = layer(weight, device), layer(made(packed, "int4 g32"), device)
    x = inputs(2, 200).to(device)
    with pytest.raises(ValueError, match=r"\(T, 200\) float32"):
        mine(x[:, :199])
    with pytest.raises(ValueError, match="rounded for"):
        mine.product(other.round(x))
    with pytest.raises(ValueError, match="contiguous"):
        mine.product(mine.round(x), out=torch.empty(37, 2, device=device).t())
    with pytest.raises(ValueError, match="ternary codes"):
        gpu_weight(replace(made(packed, "ternary"), codes=weight.codes[:, :1].repeat(1, 300)), None, device)
    assert mine(x[:0]).shape == (0, 37)
