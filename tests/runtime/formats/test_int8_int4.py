"""int8 and int4: the rules and bytes of compressed-tensors, checked against the library itself."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import formats
from runtime.errors import UserError
from runtime.formats import codes as words
from runtime.formats import dequantize, int4, int8
from runtime.formats.packed import PackedWeight

quantization = pytest.importorskip("compressed_tensors.quantization")


def _random(n: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, k, generator=generator) * 0.05).to(dtype)


def _scheme(bits: int, group: int | None):
    args = quantization.QuantizationArgs(
        num_bits=bits, type="int", symmetric=True, strategy="group" if group else "channel", group_size=group
    )
    return quantization.QuantizationScheme(targets=["Linear"], weights=args)


def _compressor(name: str):
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(name)


@pytest.mark.parametrize("group", [128, 64, 32])
def test_int4_codes_scales_and_bytes_are_those_of_the_library(group: int) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = _random(24, 256, torch.float32)
    grouped = weight.view(24, -1, group)
    scheme = _scheme(4, group)
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
    theirs = _compressor("pack-quantized").compress({"weight": weight, "weight_scale": scale}, scheme)
    packed = int4.pack(weight, group, scale_dtype=torch.float32)
    ours = int4.to_tensors(packed, "layer", scale_dtype=torch.float32)
    assert set(ours) == {f"layer.{name}" for name in theirs}
    for name, tensor in theirs.items():
        assert torch.equal(ours[f"layer.{name}"], tensor), name
        assert ours[f"layer.{name}"].dtype == tensor.dtype


def test_int8_codes_and_scales_are_those_of_the_library_within_127() -> None:
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = _random(48, 96, torch.float32)
    scheme = _scheme(8, None)
    scale, _ = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), scheme.weights)
    theirs = _compressor("int-quantized").compress({"weight": weight, "weight_scale": scale}, scheme)
    ours = int8.to_tensors(int8.pack(weight, scale_dtype=torch.float32), "layer", scale_dtype=torch.float32)
    assert torch.equal(ours["layer.weight_scale"], theirs["weight_scale"])
    assert torch.equal(ours["layer.weight"], theirs["weight"].clamp(min=-127))
    assert (theirs["weight"] == -128).any(), "the library's own codes reach −128, so the limit is tested"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [0, 64])
def test_what_was_packed_is_what_is_read_back(dtype: torch.dtype, group: int) -> None:
    weight, bias = _random(40, 192, dtype), _random(1, 40, dtype)[0]
    module = int4 if group else int8
    packed = module.pack(weight, group, bias=bias)
    tensors = module.to_tensors(packed, "a.b", dtype)
    assert tensors["a.b.weight_scale"].dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
    assert tensors["a.b.bias"].dtype == dtype
    back = module.from_tensors(tensors, "a.b")
    for field in dataclasses.fields(packed):
        ours, theirs = getattr(packed, field.name), getattr(back, field.name)
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, field.name
    error = (formats.dequantize(back) - weight.float()).abs()
    step = packed.scale.repeat_interleave(192 // packed.scale.shape[1], dim=1)
    # Half a step, and a little more at a group's maximum where the scale was rounded down.
    assert (error <= step * (0.55 if module is int4 else 1.05)).all()
    assert error.max() > 0


@given(
    n=st.integers(1, 6),
    groups=st.integers(1, 4),
    group=st.sampled_from([1, 3, 8, 20, 32]),
    power=st.floats(-30, 30),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_and_magnitude_survives_the_file(n: int, groups: int, group: int, power: float, seed: int) -> None:
    weight = torch.randn(n, groups * group, generator=torch.Generator().manual_seed(seed)) * 10**power
    packed = int4.pack(weight, group)
    back = int4.from_tensors(int4.to_tensors(packed, "x"), "x")
    assert torch.equal(packed.codes, back.codes) and torch.equal(packed.scale, back.scale)
    assert torch.isfinite(dequantize(back)).all()


def test_bits_per_weight_count_everything_that_is_stored(bits_per_weight: Callable[[PackedWeight], float]) -> None:
    weight = _random(256, 512)
    assert bits_per_weight(int8.pack(weight)) == 8 + 16 / 512
    assert bits_per_weight(int4.pack(weight, 128)) == 4 + 16 / 128 + 128 / weight.numel()
    biased = int4.pack(weight, 128, bias=_random(1, 256)[0])
    assert bits_per_weight(biased) == bits_per_weight(int4.pack(weight, 128))


def test_a_row_of_zeros_stays_zero_and_its_scale_can_be_divided_by() -> None:
    weight = _random(4, 64)
    weight[2] = 0
    for packed in (int8.pack(weight), int4.pack(weight, 32)):
        assert (packed.scale > 0).all()
        back = formats.dequantize(packed)
        assert (back[2] == 0).all() and (back[1] != 0).any()


def test_offset_and_permutation_are_undone_in_the_dense_weight() -> None:
    packed = int4.pack(_random(6, 64), 32)
    plain = dequantize(packed)
    perm = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    offset = torch.rand(6, 2)
    moved = dequantize(dataclasses.replace(packed, perm=perm, offset=offset))
    assert torch.allclose(moved[:, perm], plain - offset.repeat_interleave(32, dim=1))
    with pytest.raises(ValueError, match="symmetric int8 rows"):
        int8.to_tensors(dataclasses.replace(int8.pack(_random(6, 64)), perm=perm), "x")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [32, 96, 37, 1])
def test_words_are_those_of_the_library(bits: int, inputs: int) -> None:
    from compressed_tensors.compressors.pack_quantized import pack_to_int32

    half = 1 << bits - 1
    codes = torch.randint(-half, half, (5, inputs), dtype=torch.int8, generator=torch.Generator().manual_seed(bits))
    packed = words.pack_words(codes, bits)
    assert torch.equal(packed, pack_to_int32(codes, bits))
    assert torch.equal(words.unpack_words(packed, inputs, bits), codes)


def test_int8_experts_are_stored_in_words_and_agree_with_each_other() -> None:
    packed = int8.pack(_random(6, 64))
    name = "model.layers.0.mlp.experts.3.up_proj"
    tensors = int8.to_tensors(packed, name)
    assert set(tensors) == {f"{name}.weight_packed", f"{name}.weight_scale", f"{name}.weight_shape"}
    back = int8.from_tensors(tensors, name)
    assert back.scheme == packed.scheme and torch.equal(back.codes, packed.codes)
    assert set(int8.to_tensors(packed, "model.layers.0.mlp.up_proj")) == {
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight_scale",
    }
    layers = {name: int4.scheme(64), name.replace("3", "4"): int4.scheme(64)}
    assert formats.hf_config(layers)["config_groups"]["group_0"]["weights"]["group_size"] == 64
    with pytest.raises(ValueError, match="all experts need one scheme"):
        formats.hf_config(layers | {name: int4.scheme(32)})


def test_other_peoples_int8_scales_per_tensor_and_per_group_are_read() -> None:
    codes = torch.randint(-128, 128, (6, 64), dtype=torch.int8)
    for scale, size in ((torch.rand(1), 0), (torch.rand(6), 0), (torch.rand(6, 1), 0), (torch.rand(6, 4), 16)):
        packed = int8.from_tensors({"x.weight": codes, "x.weight_scale": scale}, "x")
        assert packed.scheme.group_size == size
        spread = scale.reshape(-1, 1) if scale.ndim == 1 else scale.repeat_interleave(64 // scale.shape[1], dim=1)
        assert torch.equal(dequantize(packed), codes.float() * spread)


def test_ragged_groups_and_scales_that_would_be_rounded_are_refused() -> None:
    assert int4.pack(_random(4, 96), 32).scale.shape == (4, 3)
    with pytest.raises(ValueError, match="64 do not divide rows of 96"):
        int4.pack(_random(4, 96), 64)
    exact = int8.pack(_random(4, 96, torch.float32), scale_dtype=torch.float32)
    assert int8.to_tensors(exact, "x", scale_dtype=torch.float32)["x.weight_scale"].dtype == torch.float32
    with pytest.raises(ValueError, match="cannot hold these values exactly"):
        int8.to_tensors(exact, "x", torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x.weight_scale": None}, "x.weight_scale is missing"),
        ({"x.weight_scale": torch.full((4, 3), float("nan"))}, "x.weight_scale must be finite"),
        ({"x.weight_scale": torch.ones(4, 5)}, "x.weight_scale has shape"),
        ({"x.weight_packed": torch.ones(4, 11, dtype=torch.int32)}, "x.weight_packed has shape"),
        ({"x.weight_packed": torch.ones(4, 12)}, "x.weight_packed must be int32"),
        ({"x.weight_shape": torch.tensor([0, 96])}, "x.weight_shape must hold two positive"),
        ({"x.weight_zero_point": torch.ones(2, 3, dtype=torch.int32)}, "x.weight_zero_point has shape"),
    ],
)
def test_damaged_int4_tensors_are_named(change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = int4.to_tensors(int4.pack(_random(4, 96), 32), "x")
    assert int4.from_tensors(tensors, "x").shape == (4, 96)
    changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    with pytest.raises(UserError, match=message):
        int4.from_tensors(changed, "x")


def test_configuration_of_one_scheme_targets_linear_and_of_several_names_modules() -> None:
    one = formats.hf_config({"model.layers.0.mlp.up_proj": int4.scheme(128)}, ["lm_head"])
    assert one["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert one["ignore"] == ["lm_head"]
    assert one["format"] == "pack-quantized"
    layers = {f"model.layers.{i}.mlp.up_proj": int4.scheme(128) for i in range(3)}
    layers |= {f"model.layers.{i}.mlp.down_proj": int4.scheme(64 if i else 32) for i in range(3)}
    layers["lm_head"] = int8.scheme()
    config = formats.hf_config(layers)
    assert config["format"] == "mixed-precision"
    groups = {g["weights"]["group_size"]: g for g in config["config_groups"].values()}
    assert groups[128]["targets"] == [r"re:^model\.layers\.\d+\.mlp\.up_proj$"]
    assert groups[64]["targets"] == ["model.layers.1.mlp.down_proj", "model.layers.2.mlp.down_proj"]
    assert groups[32]["targets"] == ["model.layers.0.mlp.down_proj"]
    assert groups[None]["targets"] == ["lm_head"] and groups[None]["format"] == "int-quantized"
    quantization.QuantizationConfig.model_validate({k: v for k, v in config.items() if k != "quant_method"})
    formats.check_supported(config)
