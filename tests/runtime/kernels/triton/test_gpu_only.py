"""What only a GPU can show: loops of many steps in flight, captured graphs, float products of real length."""

from collections.abc import Callable

import pytest
import torch

from runtime.formats.packed import PackedWeight
from runtime.kernels.reference import packed_linear

pytest.importorskip("triton")

from runtime.formats import dequantize, fp8
from runtime.kernels.triton import interpreted
from runtime.kernels.triton.linear import triton_linear
from runtime.kernels.triton.weights import gpu_weight
from tests.runtime.kernels.triton.test_linear import in_splits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or interpreted(), reason="needs a GPU")

Packed = Callable[..., PackedWeight]
WIDTHS = (1, 8, 9, 16, 17, 64, 65, 300)
# Kind, group, rest: every way of unpacking, with and without groups.
CASES = {
    "int8": ("int8", 0, {"bias": True}),
    "int8 static": ("int8", 0, {"static": True}),
    "int8 groups": ("int8", 128, {}),
    "planes": ("int8", 0, {"planes": True}),
    "int4 rows": ("int4", 0, {"offset": True}),
    "int4 g32": ("int4", 32, {}),
    "int4 g128": ("int4", 128, {"offset": True, "unsigned": True, "perm": True}),
    "int4 g512": ("int4", 512, {}),
    "int3": ("int4", 64, {"bits": 3}),
    "nf4": ("nf4", 64, {}),
    "ternary": ("ternary", 0, {}),
    "ternary groups": ("ternary", 256, {}),
}


@pytest.mark.parametrize(("n", "k"), [(1000, 4096), (5000, 2048)])
@pytest.mark.parametrize("name", CASES)
def test_long_rows_have_the_bits_of_the_reference(name: str, n: int, k: int, packed: Packed) -> None:
    kind, group, rest = CASES[name]
    weight = packed(kind, n, k, group, **rest)  # type: ignore[arg-type]
    x = torch.randn(max(WIDTHS), k, generator=torch.Generator().manual_seed(1))
    mine = triton_linear(gpu_weight(weight, None, "cuda"))
    expected = in_splits(mine, weight, x) if group else packed_linear(weight)(x)
    for width in WIDTHS:
        assert torch.equal(mine(x[:width].cuda()).cpu(), expected[:width]), f"width {width}"


@pytest.mark.parametrize("name", CASES)
def test_split_rows_have_the_same_bits_at_every_width(name: str, packed: Packed) -> None:
    kind, group, rest = CASES[name]
    mine = triton_linear(gpu_weight(packed(kind, 500, 11008, group, **rest), None, "cuda"))  # type: ignore[arg-type]
    x = torch.randn(max(WIDTHS), 11008, generator=torch.Generator().manual_seed(2)).cuda()
    whole = mine(x)
    for width in WIDTHS:
        assert torch.equal(mine(x[:width]), whole[:width]), f"width {width}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [4096, 11008, 2056])
def test_float_products_of_real_length(dtype: torch.dtype, k: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(1000, k, generator=generator) * 0.02).to(dtype)
    x = torch.randn(max(WIDTHS), k, generator=generator)
    mine = triton_linear(gpu_weight(weight, None, "cuda"))
    whole = mine(x.cuda())
    exact = x.double() @ weight.double().t()
    assert ((whole.double().cpu() - exact).norm() / exact.norm()) < 2e-6
    for width in WIDTHS:
        assert torch.equal(mine(x[:width].cuda()), whole[:width]), f"width {width}"


@pytest.mark.parametrize("k", [4096, 11008, 2056])
def test_fp8_products_of_real_length(k: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = fp8.pack(torch.randn(1000, k, generator=generator) * 0.02)
    x = torch.randn(max(WIDTHS), k, generator=generator)
    mine = triton_linear(gpu_weight(weight, None, "cuda"))
    whole = mine(x.cuda())
    exact = x.double() @ dequantize(weight).double().t()
    assert ((whole.double().cpu() - exact).norm() / exact.norm()) < 2e-6
    for width in WIDTHS:
        assert torch.equal(mine(x[:width].cuda()), whole[:width]), f"width {width}"


def test_runs_in_a_captured_graph(packed: Packed) -> None:
    mine = triton_linear(gpu_weight(packed("int4", 500, 11008, 128), None, "cuda"))
    x = torch.randn(5, 11008, generator=torch.Generator().manual_seed(4)).cuda()
    expected = mine(x)
    held = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mine(held)
    held.copy_(x)
    graph.replay()
    assert torch.equal(y, expected)
