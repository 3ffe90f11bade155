"""Single layers of compressed-tensors: what its compressor wrote is read exactly, and what we write it reads exactly.

Zero points, 2 to 6 bits and activation order. (test_int8_int4.py has the rest.)
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import formats
from runtime.formats import codes as words
from runtime.formats import dequantize, int4
from runtime.formats.packed import PackedWeight, Scheme
from tests.runtime.formats.compressed_tensors_library import (
    CONFIG,
    SHAPES,
    compressor,
    generator,
    library_compresses,
    library_scheme,
    named,
    reorder,
    weights,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [6, 5, 4, 3, 2])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_layers_of_the_library_are_read_exactly(bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> None:
    scheme = library_scheme(bits, group, symmetric)
    for n, k in SHAPES:
        if k % (group or 1):
            continue
        stored, dense = library_compresses(weights(n, k), scheme, dtype, "pack-quantized")
        config = CONFIG | {"format": "pack-quantized", "config_groups": {"g": scheme.model_dump()}}
        formats.check_supported(config)
        packed = formats.read(config, named(stored, "a.b"), "a.b")
        assert isinstance(packed, PackedWeight)
        assert packed.scheme == Scheme("int6" if bits > 4 else "int4", bits, group, symmetric, "int8-group")
        assert torch.equal(formats.dequantize(packed), dense), (n, k)
        zeros = packed.codes.new_zeros(1) if packed.offset is None else (packed.offset / packed.scale).round()
        if not symmetric and n > 4:
            assert {int(zeros.min()), int(zeros.max())} == {-(1 << bits - 1), (1 << bits - 1) - 1}, "both ends"
        # And back: byte for byte what the library wrote.
        again = int4.to_tensors(packed, "a.b", scale_dtype=dtype)
        assert again.keys() == named(stored, "a.b").keys()
        assert all(torch.equal(again[f"a.b.{name}"], tensor) for name, tensor in stored.items())
        assert all(again[f"a.b.{name}"].dtype == tensor.dtype for name, tensor in stored.items())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [6, 5, 4, 3, 2])
@pytest.mark.parametrize("group", [0, 32])
def test_our_rounding_is_the_librarys(bits: int, group: int, symmetric: bool) -> None:
    scheme = library_scheme(bits, group, symmetric)
    for n, k in SHAPES:
        stored, dense = library_compresses(weights(n, k, 1), scheme, torch.float32, "pack-quantized")
        packed = int4.pack(weights(n, k, 1), group, bits=bits, symmetric=symmetric, scale_dtype=torch.float32)
        ours = int4.to_tensors(packed, "x", scale_dtype=torch.float32)
        assert all(torch.equal(ours[f"x.{name}"], tensor) for name, tensor in stored.items())
        assert torch.equal(dequantize(packed), dense)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_weight_survives_the_file_and_the_library_reads_it(data: st.DataObject) -> None:
    bits, symmetric = data.draw(st.sampled_from([6, 5, 4, 3, 2]), "bits"), data.draw(st.booleans(), "symmetric")
    n, groups = data.draw(st.integers(1, 40), "n"), data.draw(st.integers(1, 4), "groups")
    size = data.draw(st.sampled_from([1, 3, 8, 20, 32]), "size")
    weight = weights(n, groups * size, data.draw(st.integers(0, 1000), "seed"))
    weight = weight * 10 ** data.draw(st.floats(-20, 20), "power")
    packed = int4.pack(weight, size, bits=bits, symmetric=symmetric)
    tensors = int4.to_tensors(packed, "x")
    back = int4.from_tensors(tensors, "x", bits=bits)
    assert back.scheme == packed.scheme and torch.equal(back.codes, packed.codes)
    assert torch.equal(back.scale, packed.scale)
    assert (back.offset is None) == symmetric
    assert back.offset is None or packed.offset is None or torch.equal(back.offset, packed.offset)
    local = {name.removeprefix("x."): tensor for name, tensor in tensors.items()}
    local["weight_scale"] = local["weight_scale"].float()
    theirs = compressor("pack-quantized").decompress(local, library_scheme(bits, size, symmetric))["weight"]
    assert torch.equal(theirs, dequantize(packed))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("inputs", [1, 8, 9, 32, 37, 96])
def test_words_are_those_of_the_library_along_both_dimensions(bits: int, inputs: int) -> None:
    from compressed_tensors.compressors.pack_quantized import pack_to_int32

    half = 1 << bits - 1
    codes = torch.randint(-half, half, (5, inputs), dtype=torch.int8, generator=generator(bits))
    packed = words.pack_words(codes, bits)
    assert torch.equal(packed, pack_to_int32(codes, bits))
    assert torch.equal(words.unpack_words(packed, inputs, bits), codes)
    columns = codes.t().contiguous()
    assert torch.equal(words.pack_words(columns.t(), bits).t(), pack_to_int32(columns, bits, packed_dim=0))


@pytest.mark.parametrize("bits", [6, 5, 4, 3, 2])
def test_steps_of_the_rounding_are_halves(bits: int) -> None:
    """An asymmetric grid has a code for 0, and no weight is further off than half a step."""
    weight = weights(16, 64, 2)
    weight[:, ::7] = 0
    packed = int4.pack(weight, 32, bits=bits, symmetric=False, scale_dtype=torch.float32)
    back = dequantize(packed)
    step = packed.scale.repeat_interleave(32, dim=1)
    assert ((back - weight).abs() <= step * 0.501).all() and (back[:, ::7] == 0).all()
    # Rows on one side of 0 are why: a symmetric grid of the same bits spends half its codes on nothing.
    plain = dequantize(int4.pack(weight, 32, bits=bits, scale_dtype=torch.float32))
    one_sided = [1, 2, 5, 6]
    assert (back - weight)[one_sided].norm() < 0.7 * (plain - weight)[one_sided].norm()


@pytest.mark.parametrize("bits", [6, 5, 4, 3, 2])
def test_bits_per_weight_count_zero_points_and_input_order(
    bits: int, bits_per_weight: Callable[[PackedWeight], float]
) -> None:
    weight, shape = weights(64, 512), 2 * 64 / (64 * 512)
    packed = int4.pack(weight, 128, bits=bits, symmetric=False)
    zeros = bits / 128
    assert bits_per_weight(packed) == bits + 16 / 128 + zeros + shape
    assert bits_per_weight(int4.pack(weight, 128, bits=bits)) == bits + 16 / 128 + shape
    ordered = reorder(packed, torch.randperm(512, generator=generator()))
    assert bits_per_weight(ordered) == bits + 16 / 128 + zeros + shape + 32 * 512 / weight.numel()


def test_offsets_that_are_no_zero_points_are_refused() -> None:
    packed = int4.pack(weights(8, 64), 32, symmetric=False)
    assert packed.offset is not None and "x.weight_zero_point" in int4.to_tensors(packed, "x")
    for offset, message in (
        (packed.offset + packed.scale * 0.5, "whole zero points"),
        (packed.scale * 8, "must lie in -8..7, found 8..8"),
    ):
        with pytest.raises(ValueError, match=message):
            int4.to_tensors(dataclasses.replace(packed, offset=offset), "x")
    with pytest.raises(ValueError, match="is written for integers of 2 to 6 bits"):
        int4.to_tensors(dataclasses.replace(packed, scheme=int4.scheme(32)), "x")
    # An offset of any kind still has a meaning in memory.
    half = dequantize(dataclasses.replace(packed, offset=packed.offset + packed.scale * 0.5))
    assert torch.allclose(half, dequantize(packed) - 0.5 * packed.scale.repeat_interleave(32, dim=1))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [6, 5, 4, 3, 2])
def test_activation_order_goes_to_disk_and_back(bits: int, symmetric: bool) -> None:
    weight, perm = weights(9, 96), torch.randperm(96, generator=generator(4))
    packed = reorder(int4.pack(weight[:, perm], 32, bits=bits, symmetric=symmetric), perm)
    assert (dequantize(packed) - weight).abs().max() < 0.3, "the order is undone"
    tensors = int4.to_tensors(packed, "x")
    index = tensors["x.weight_g_idx"]
    assert index.dtype == torch.int32
    # By hand, as the format's words are: each input's code on its group's scale.
    codes = words.unpack_words(tensors["x.weight_packed"], 96, bits).float()
    if not symmetric:
        zeros = words.unpack_words(tensors["x.weight_zero_point"].t(), 9, bits).t()
        codes = codes - zeros[:, index.long()]
    by_hand = codes * tensors["x.weight_scale"].float()[:, index.long()]
    assert torch.equal(by_hand, dequantize(packed))
    back = int4.from_tensors(tensors, "x", bits=bits)
    assert back.perm is not None and torch.equal(dequantize(back), by_hand)
    assert torch.equal(back.scale, packed.scale)
    # Left packed or not, kernels get codes in the groups' order.
    fast = int4.from_tensors(tensors, "x", unpack=False, bits=bits)
    assert fast.nibbles is None and torch.equal(fast.codes, back.codes)
    # Inside a group the order of activations is not stored; the product does not depend on it.
    assert torch.equal(back.perm.view(3, 32).sort().values, perm.view(3, 32).sort().values)


def test_groups_in_input_order_need_no_permutation() -> None:
    tensors = int4.to_tensors(int4.pack(weights(8, 64), 32), "x")
    plain = int4.from_tensors(tensors, "x", unpack=False)
    assert plain.perm is None and plain.nibbles == "low"
    for index in (torch.arange(64) // 32, torch.full((64,), -1)):
        read = int4.from_tensors(tensors | {"x.weight_g_idx": index.to(torch.int32)}, "x", unpack=False)
        assert read.perm is None and read.nibbles == "low" and torch.equal(read.codes, plain.codes)
    # Group ids as they come, not in order of their first input.
    turned = int4.from_tensors(tensors | {"x.weight_g_idx": (1 - torch.arange(64) // 32).to(torch.int32)}, "x")
    assert turned.perm is not None
    expected = dequantize(int4.from_tensors(tensors, "x")) / plain.scale.repeat_interleave(32, dim=1)
    assert torch.allclose(dequantize(turned), expected * plain.scale.flip(1).repeat_interleave(32, dim=1))
