"""Layers that libraries run beside Triton's kernels: their values, their bits, and what stays Triton's."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from runtime.errors import UserError
from runtime.formats import dequantize, fp8
from runtime.formats.packed import PackedWeight
from runtime.kernels.dispatch import Kernel, join, linear
from runtime.kernels.joined import Joined
from runtime.kernels.libraries import fp8_rows
from runtime.kernels.library_choice import IMPLEMENTATIONS, Choice, wanted
from runtime.kernels.reference import packed_linear
from runtime.kernels.triton.linear import TritonJoined, TritonLinear, triton_linear
from runtime.kernels.triton.weights import gpu_weight
from runtime.kernels.triton.with_libraries import IntMmLinear, MixedLinear, keeps_bits, mixed_linear

Packed = Callable[..., PackedWeight]
WIDTHS = (1, 5, 16, 17, 40)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def on(weight: PackedWeight, device: torch.device) -> PackedWeight:
    parts = ("codes", "scale", "offset", "perm", "bias", "input_scale")
    there = {name: getattr(weight, name) for name in parts}
    return replace(weight, **{name: value.to(device) for name, value in there.items() if value is not None})


def named(name: str) -> Kernel:
    """As `choose` gives it for a name, without the probe that an exact one is held to."""
    return Kernel(name, True, "", exact=False, table=wanted(name))


@pytest.mark.parametrize(
    "rest",
    [{}, {"bias": True}, {"static": True}, {"offset": True, "perm": True}],
    ids=["plain", "bias", "static", "offset and order"],
)
@pytest.mark.parametrize(("n", "k"), [(48, 96), (8, 75), (16, 1)])
def test_the_integer_product_has_the_bits_of_the_reference(
    n: int, k: int, rest: dict[str, bool], packed: Packed, device: torch.device
) -> None:
    weight = packed("int8", n, k, **rest)
    x = random(max(WIDTHS), k)
    mine = linear(on(weight, device), None, named("torch-int-mm"))
    assert isinstance(mine, IntMmLinear) and mine.libraries == ("torch-int-mm",)
    expected = packed_linear(weight)(x)
    for width in WIDTHS:
        assert torch.equal(mine(x[:width].to(device)).cpu(), expected[:width]), f"width {width}"
    assert mine(x[:0].to(device)).shape == (0, n)


def test_the_integer_product_adds_a_residual_and_holds_codes_at_their_ends(
    packed: Packed, device: torch.device
) -> None:
    weight = packed("int8", 16, 200)
    weight = replace(weight, codes=torch.full_like(weight.codes, -128))
    mine = linear(on(weight, device), None, named("torch-int-mm"))
    assert isinstance(mine, IntMmLinear)
    x, residual = torch.full((3, 200), -2.0), random(3, 16, seed=2)
    out = mine.product(mine.round(x.to(device)), residual=residual.to(device))
    assert torch.equal(out.cpu(), packed_linear(weight)(x) + residual)
    x[1, 7] = torch.nan
    assert mine(x.to(device)).isnan().any(dim=1).tolist() == [False, True, False]


def test_rows_that_are_not_its_own_stay_triton_s(packed: Packed, device: torch.device) -> None:
    table = (Choice(None, "int8", 17, None, "torch-int-mm", True),)
    weight = on(packed("int8", 16, 64), device)
    mine = linear(weight, None, Kernel("triton", True, "", exact=True, table=table))
    assert isinstance(mine, IntMmLinear) and mine.spans == ((17, None),)
    x, plain = random(33, 64).to(device), linear(weight, None, Kernel("triton", True, "", exact=True))
    for width in (16, 17, 33):
        assert torch.equal(mine(x[:width]), plain(x[:width]))


@pytest.mark.parametrize(
    ("group", "rest"),
    [(32, {}), (64, {"offset": True, "unsigned": True, "perm": True, "bias": True}), (128, {"offset": True})],
)
def test_the_int4_product(group: int, rest: dict[str, bool], packed: Packed, device: torch.device) -> None:
    weight = packed("int4", 48, 256, group, **rest)
    mine = linear(on(weight, device), None, named("torch-int4"))
    assert isinstance(mine, MixedLinear) and mine.libraries == ("torch-int4",) and mine.rest is None
    x = random(20, 256)
    ideal = x.double() @ dequantize(weight).double().t()
    if weight.bias is not None:
        ideal = ideal + weight.bias.double()
    found = mine(x.to(device)).cpu()
    assert found.dtype == torch.float32
    # bfloat16 has 8 bits: of inputs, of scales and of the result.
    assert float((found.double() - ideal).norm() / ideal.norm()) < 0.01


def test_the_fp8_product_rounds_inputs_by_row(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 products need compute capability 8.9")
    weight = fp8.pack(random(32, 64, seed=1), bias=random(32, seed=2))
    mine = linear(on(weight, device), None, named("torch-scaled-mm"))
    assert isinstance(mine, MixedLinear) and mine.libraries == ("torch-scaled-mm",)
    x = random(6, 64) * torch.tensor([1.0, 1e-6, 1e6, 1.0, 0.0, 3.0]).unsqueeze(1)
    codes, step = fp8_rows(x)
    assert weight.bias is not None
    ideal = (codes.double() * step) @ dequantize(weight).double().t() + weight.bias
    found = mine(x.to(device)).cpu()
    assert torch.allclose(found.double(), ideal, rtol=0.01, atol=0.01 * float(weight.bias.abs().max()))
    x[3, 1] = torch.nan
    assert mine(x.to(device)).isnan().any(dim=1).tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dense_products(dtype: torch.dtype, device: torch.device) -> None:
    weight, bias, x = random(24, 40, seed=1).to(dtype), random(24, seed=2), random(7, 40)
    mine = linear(weight.to(device), bias.to(device), named("torch"))
    assert isinstance(mine, MixedLinear) and mine.libraries == ("torch",)
    ideal = x.double() @ weight.double().t() + bias.double()
    assert float((mine(x.to(device)).cpu().double() - ideal).norm() / ideal.norm()) < 0.01


@pytest.mark.parametrize(
    ("name", "kind", "n", "k", "group", "rest"),
    [
        ("torch-int-mm", "int8", 37, 64, 0, {}),
        ("torch-int-mm", "int8", 16, 64, 32, {}),
        ("torch-int-mm", "int8", 16, 64, 0, {"planes": True}),
        ("torch-int-mm", "ternary", 16, 64, 0, {}),
        ("torch-int4", "int4", 16, 128, 0, {}),
        ("torch-int4", "int4", 16, 96, 32, {}),
        ("torch-int4", "int4", 20, 128, 32, {}),
        ("torch-int4", "nf4", 16, 128, 64, {}),
        ("torch-scaled-mm", "int8", 16, 64, 0, {}),
        ("bitsandbytes", "int8", 16, 64, 0, {"perm": True}),
        ("bitsandbytes", "nf4", 16, 96, 64, {}),
        ("torch", "int8", 16, 64, 0, {}),
    ],
)
def test_what_a_library_does_not_take_is_triton_s(
    name: str, kind: str, n: int, k: int, group: int, rest: dict[str, bool], packed: Packed, device: torch.device
) -> None:
    if device.type == "cuda" and (name, n) == ("torch-int4", 20):
        n = 12
    mine = linear(on(packed(kind, n, k, group, **rest), device), None, named(name))
    assert type(mine) is TritonLinear


def test_fp8_sizes_that_torch_does_not_take(device: torch.device) -> None:
    assert type(linear(on(fp8.pack(random(17, 64)), device), None, named("torch-scaled-mm"))) is TritonLinear


def test_joined_layers(packed: Packed, device: torch.device) -> None:
    """As one product where they read their inputs alike; each by itself where not."""
    x = random(5, 128).to(device)
    for name, kind, group, kinds in (
        ("torch-int-mm", "int8", 0, TritonJoined),
        ("torch-int4", "int4", 32, Joined),
    ):
        weights = [on(packed(kind, n, 128, group, bias=n == 32, seed=n), device) for n in (16, 32)]
        joined = join(weights, [None, None], [16, 32], named(name))
        assert type(joined) is kinds and len(joined.parts) == 1 and joined.parts[0].libraries == (name,)
        apart = [linear(weight, None, named(name))(x) for weight in weights]
        for found, each in zip(joined.split(x), apart, strict=True):
            assert torch.allclose(found, each, rtol=1e-2, atol=1e-2)
    unlike = [on(packed("int4", 16, 128, 32, unsigned=u, offset=u, seed=int(u)), device) for u in (False, True)]
    joined = join(unlike, [None, None], [16, 16], named("torch-int4"))
    assert type(joined) is Joined and len(joined.parts) == 2
    assert torch.equal(joined.split(x)[1], linear(unlike[1], None, named("torch-int4"))(x))
    plain = [random(16, 128, seed=seed).bfloat16().to(device) for seed in (1, 2)]
    joined = join(plain, [None, torch.ones(16, device=device)], [16, 16], named("torch"))
    assert len(joined.parts) == 1 and joined.split(x)[1].shape == (5, 16)


def test_a_table_s_claim_is_probed(packed: Packed, device: torch.device) -> None:
    """A library whose bits are not Triton's keeps them for a while only where Triton's kernels run the other rows."""
    weight = on(packed("int4", 16, 128, 32), device)
    own = triton_linear(gpu_weight(weight, None, device))
    table = [Choice(None, "int4", 1, 16, "torch-int4", True)]
    free = mixed_linear(own, weight, None, table, exact=False)
    assert isinstance(free, MixedLinear) and free.rest is own and free.libraries == ("torch-int4",)
    assert {t.data_ptr() for t in own.weight.tensors} < {t.data_ptr() for t in free.tensors}
    assert free.nbytes == free.parts[0][1].nbytes
    x = random(17, 128).to(device)
    assert torch.equal(free(x), own(x)) and not torch.equal(free(x[:16]), own(x[:16]))
    with pytest.warns(UserWarning, match=r"torch-int4: the bits of int4 layers .* change with the width"):
        assert mixed_linear(own, weight, None, table, exact=True) is own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mixed_linear(own, weight, None, [], exact=True) is own


def test_a_library_that_fails_is_refused_or_left_out(
    packed: Packed, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling")

    weight = on(packed("int8", 16, 64), device)
    own, table = triton_linear(gpu_weight(weight, None, device)), wanted("torch-int-mm")
    monkeypatch.setattr(torch, "_int_mm", fails)
    monkeypatch.setattr("runtime.kernels.triton.with_libraries.integer_product", fails)
    with pytest.raises(
        UserError, match=r"torch-int-mm: no product of int8 layers of 16 outputs and 64 inputs .*CUBLAS"
    ):
        mixed_linear(own, weight, None, table, exact=False)
    with pytest.warns(UserWarning, match=r"torch-int-mm: no product of int8 layers .* Triton's kernels run them"):
        assert mixed_linear(own, weight, None, table, exact=True) is own


def test_the_probe() -> None:
    weight, cpu = random(16, 8), torch.device("cpu")

    def steady(x: Tensor) -> Tensor:
        return torch.stack([row @ weight for row in x])

    def wide(x: Tensor) -> Tensor:
        return steady(x) + (1e-3 if len(x) > 500 else 0.0)

    def alone(x: Tensor) -> Tensor:
        return steady(x) + (1e-3 if len(x) == 1 else 0.0)

    def placed(x: Tensor) -> Tensor:
        return steady(x) + 1e-3 * torch.arange(len(x)).unsqueeze(1)

    assert keeps_bits(steady, 16, cpu) and keeps_bits(wide, 16, cpu)
    assert not keeps_bits(wide, 16, cpu, borders=(500,))
    assert not keeps_bits(alone, 16, cpu) and not keeps_bits(placed, 16, cpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: bitsandbytes' GEMV runs nowhere else")
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_bitsandbytes_beside_triton(rows: int, packed: Packed) -> None:
    pytest.importorskip("bitsandbytes")
    weight = on(packed("nf4", 96, 256, 64), torch.device("cuda"))
    mine = linear(weight, None, named("bitsandbytes"))
    assert isinstance(mine, MixedLinear)
    x = random(rows, 256).cuda()
    ideal = x.double() @ dequantize(weight).double().t()
    assert float((mine(x).double() - ideal).norm() / ideal.norm()) < 0.02


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: graphs are captured nowhere else")
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_libraries_run_in_a_captured_graph(name: str, rows: int, packed: Packed) -> None:
    if name == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
    if torch.cuda.get_device_capability() < IMPLEMENTATIONS[name].least:
        pytest.skip(f"{name} needs a newer GPU")
    cuda = torch.device("cuda")
    weight = {
        "torch-int-mm": on(packed("int8", 64, 256), cuda),
        "torch-int4": on(packed("int4", 64, 256, 64), cuda),
        "torch-scaled-mm": on(fp8.pack(random(64, 256, seed=1)), cuda),
        "torch": random(64, 256, seed=1).bfloat16().cuda(),
        "bitsandbytes": on(packed("nf4", 64, 256, 64), cuda),
    }[name]
    mine = linear(weight, None, named(name))
    x = random(rows, 256).cuda()
    expected, held = mine(x), torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mine(held)
    held.copy_(x)
    graph.replay()
    assert torch.equal(y, expected)
