"""How packed weights are laid out for the kernels, and which kernels `dispatch` takes."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import UserError
from runtime.formats.packed import PackedWeight
from runtime.kernels import dispatch, triton
from runtime.kernels.reference import packed_linear
from runtime.kernels.triton.weight_layout import CHUNKS, cut
from runtime.model.planes import upper_linear

pytest.importorskip("triton")

from runtime.kernels.triton.linear import TritonJoined, TritonLinear
from runtime.kernels.triton.weights import MAX_INPUTS, gpu_weight

Packed = Callable[..., PackedWeight]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 30_000), st.integers(0, 3000), st.sampled_from([1, 2, 4]))
def test_a_cut_holds_every_input_in_whole_chunks(inputs: int, group: int, per_byte: int) -> None:
    found = cut(inputs, group, per_byte)
    assert found.chunk in CHUNKS
    assert found.group <= found.padded < found.group + CHUNKS[-1] * per_byte
    assert (found.groups - 1) * found.group < inputs <= found.groups * found.group
    assert found.groups <= found.columns < found.groups + per_byte
    assert found.stored % (found.chunk * per_byte) == 0
    if found.units:
        assert found.padded == found.units * found.chunk * per_byte
        assert found.columns == found.groups
    else:
        assert found.padded == found.chunk


@pytest.mark.parametrize("inputs", [2048, 4096, 5632, 11008, 14336])
def test_usual_sizes_are_stored_without_padding(inputs: int) -> None:
    for per_byte, group in ((1, 0), (2, 0), (2, 32), (2, 64), (2, 128), (4, 0), (4, 256)):
        assert cut(inputs, group, per_byte).row_bytes == inputs // per_byte


def test_bytes(packed: Packed, device: torch.device) -> None:
    sizes = {"int8": 1.0, "int4": 0.5, "nf4": 0.5, "ternary": 0.25}
    for kind, size in sizes.items():
        weight = gpu_weight(packed(kind, 8, 512, 64 if size == 0.5 else 0), None, device)
        assert weight.codes.nbytes == 8 * 512 * size


def test_refuses_what_could_overflow(packed: Packed, device: torch.device) -> None:
    with pytest.raises(ValueError, match="could overflow"):
        gpu_weight(packed("int8", 1, MAX_INPUTS + 1), None, device)
    with pytest.raises(ValueError, match="planes"):
        gpu_weight(packed("int4", 1, 64, 32, planes=True), None, device)


def _kernel() -> dispatch.Kernel:
    return dispatch.choose("triton", "cuda" if torch.cuda.is_available() else "cpu")


def _on(weight: PackedWeight, device: torch.device) -> PackedWeight:
    parts = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in vars(weight).items()
    }
    return PackedWeight(**parts)


@pytest.mark.parametrize("kinds", ["same", "orders", "zero points", "mixed"])
def test_joined_layers_have_the_bits_of_each_alone(kinds: str, packed: Packed, device: torch.device) -> None:
    rest = {
        "same": [{}, {"bias": True}, {}],
        "orders": [{"perm": True, "seed": 1}, {"perm": True, "seed": 1}, {"perm": True, "seed": 2}],
        "zero points": [{"offset": True}, {"offset": True}, {"offset": True, "bias": True}],
        "mixed": [{}, {"offset": True}, {"bits": 2}],
    }[kinds]
    weights = [packed("int4", n, 200, 32, **options) for n, options in zip((20, 9, 33), rest, strict=True)]  # type: ignore[arg-type]
    joined = dispatch.join([_on(w, device) for w in weights], [None] * 3, (20, 9, 33), _kernel())
    assert isinstance(joined, TritonJoined)
    assert len(joined.parts) == (1 if kinds in ("same", "zero points") else 3)
    assert (joined.how is None) == (kinds == "orders")
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(6))
    for weight, found in zip(weights, joined.split(x.to(device)), strict=True):
        assert torch.equal(found.cpu(), packed_linear(weight)(x))


def test_float_layers_join(device: torch.device) -> None:
    weights = [torch.randn(n, 64, generator=torch.Generator().manual_seed(n)).bfloat16().to(device) for n in (20, 9)]
    joined = dispatch.join(weights, [None, torch.ones(9, device=device)], (20, 9), _kernel())
    assert len(joined.parts) == 1
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(7)).to(device)
    alone = [
        dispatch.linear(w, b, _kernel())(x) for w, b in zip(weights, (None, torch.ones(9, device=device)), strict=True)
    ]
    for found, expected in zip(joined.split(x), alone, strict=True):
        assert torch.equal(found, expected)


def test_an_upper_view_of_a_layer_with_planes(packed: Packed, device: torch.device) -> None:
    whole = dispatch.linear(_on(packed("int8", 8, 64, planes=True), device), None, _kernel())
    upper = upper_linear(whole)
    assert isinstance(upper, TritonLinear)
    assert upper.weight.kind == "upper"
    plain = dispatch.linear(_on(packed("int8", 8, 64), device), None, _kernel())
    assert upper_linear(plain) is plain


def test_is_listed_where_it_runs() -> None:
    names = [kernel.name for kernel in dispatch.available("cpu")]
    assert ("triton" in names) == triton.interpreted()
    assert triton.interpreted() or not triton.usable("cpu")[0]
    # Never by itself on a CPU.
    assert dispatch.choose("auto", "cpu").name != "triton"
    if torch.cuda.is_available():
        assert dispatch.available("cuda")[0].name == "triton"
        assert not triton.usable(f"cuda:{torch.cuda.device_count()}")[0]
    else:
        found, why = triton.usable("cuda")
        assert not found
        assert "no CUDA device" in why
        with pytest.raises(UserError, match="cannot run here"):
            dispatch.choose("triton", "cuda")
