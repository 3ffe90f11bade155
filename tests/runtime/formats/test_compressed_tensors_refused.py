"""compressed-tensors' configurations and tensors that do not fit each other, or that nobody reads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import formats
from runtime.errors import UserError
from runtime.formats import int4, int8
from runtime.formats.packed import PackedWeight, Scheme
from tests.runtime.formats.compressed_tensors_library import (
    CONFIG,
    generator,
    library_compresses,
    library_scheme,
    named,
    reorder,
    weights,
)


def grouped(**changes: Any) -> dict[str, Any]:
    plain = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return CONFIG | {"format": "pack-quantized", "config_groups": {"g": {"weights": plain | changes}}}


@pytest.mark.parametrize("inputs", [8, 16, 18, 24])
def test_layers_of_few_inputs_are_told_apart_by_the_groups_targets(inputs: int) -> None:
    """A row of 16 inputs or fewer is as many words in 3 bits as in 4: the words alone do not say which."""
    layers = {f"model.layers.{block}.{name}": bits for block in (0, 1) for name, bits in (("a", 2), ("b", 3), ("c", 4))}
    packed = {name: int4.pack(weights(8, inputs, bits), inputs, bits=bits) for name, bits in layers.items()}
    tensors = {
        name: tensor for layer, weight in packed.items() for name, tensor in int4.to_tensors(weight, layer).items()
    }
    config = formats.hf_config({name: weight.scheme for name, weight in packed.items()})
    formats.check_supported(config)
    for name, weight in packed.items():
        back = formats.read(config, tensors, name)
        assert isinstance(back, PackedWeight)
        assert back.scheme.bits == weight.scheme.bits
        assert torch.equal(formats.dequantize(back), formats.dequantize(weight))
    # By name, too; and not by an expression that could run for hours.
    for group in config["config_groups"].values():
        group["targets"] = [name for name, bits in layers.items() if bits == group["weights"]["num_bits"]]
    assert isinstance(formats.read(config, tensors, "model.layers.1.b"), PackedWeight)
    for group in config["config_groups"].values():
        group["targets"] = ["re:(model|(layers.*)*)*b"]
    if inputs < 24:
        with pytest.raises(UserError, match="does not say in how many bits"):
            formats.read(config, tensors, "model.layers.1.b")
    with pytest.raises(UserError, match="targets must be a list of names"):
        formats.check_supported(grouped() | {"config_groups": {"g": grouped()["config_groups"]["g"] | {"targets": 3}}})


def test_tensors_and_configuration_must_agree() -> None:
    symmetric, zeros = (int4.to_tensors(int4.pack(weights(8, 64), 32, symmetric=s), "x") for s in (True, False))
    perm = torch.randperm(64, generator=generator())
    ordered = int4.to_tensors(reorder(int4.pack(weights(8, 64), 32), perm), "x")
    for config, tensors in ((grouped(), symmetric), (grouped(symmetric=False), zeros), (grouped(), ordered)):
        assert isinstance(formats.read(config, tensors, "x"), PackedWeight)
    for actorder in ("group", "dynamic", True):
        assert isinstance(formats.read(grouped(actorder=actorder), ordered, "x"), PackedWeight)
        with pytest.raises(UserError, match=r"x.weight_g_idx is missing"):
            formats.read(grouped(actorder=actorder), symmetric, "x")
    for actorder in ("weight", "static", None, False):
        formats.check_supported(grouped(actorder=actorder))
        assert isinstance(formats.read(grouped(actorder=actorder), symmetric, "x"), PackedWeight)
    with pytest.raises(UserError, match=r"x.weight_zero_point is missing, and every group of 4 bits"):
        formats.read(grouped(symmetric=False), symmetric, "x")
    with pytest.raises(UserError, match=r"x.weight_zero_point is there, and every group of 4 bits"):
        formats.read(grouped(), zeros, "x")
    with pytest.raises(UserError, match=r"does not say in how many bits .*config.json has 3;"):
        formats.read(grouped(num_bits=3), symmetric, "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 7}, "integers of 2 or 3 or 4 or 5 or 6 or 8 bits, found type 'int', num_bits 7"),
        ({"type": "float"}, "found type 'float'"),
        ({"symmetric": "no"}, "symmetric 'no'"),
        ({"group_size": {}}, "group_size must be a whole number or null, found {}"),
        ({"num_bits": [4]}, r"num_bits \[4\]"),
        ({"actorder": "sideways"}, "actorder must be 'group', 'weight', 'static' or null, found 'sideways'"),
    ],
)
def test_configurations_that_are_not_read_are_named(change: dict[str, Any], message: str) -> None:
    formats.check_supported(grouped())
    with pytest.raises(UserError, match=message):
        formats.check_supported(grouped(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x.weight_zero_point": torch.zeros(2, 3, dtype=torch.int32)}, r"x.weight_zero_point has shape \[2, 3\]"),
        ({"x.weight_zero_point": torch.zeros(1, 3)}, "x.weight_zero_point must be int32"),
        ({"x.weight_g_idx": torch.zeros(95, dtype=torch.int32)}, r"x.weight_g_idx has shape \[95\]"),
        ({"x.weight_g_idx": torch.zeros(96)}, "x.weight_g_idx must be int32"),
        ({"x.weight_g_idx": torch.zeros(96, dtype=torch.int32)}, "must put 32 of the 96 inputs into each of 3"),
        ({"x.weight_g_idx": torch.arange(96, dtype=torch.int32) // 24}, "must put 32 of the 96 inputs"),
        ({"x.weight_g_idx": torch.arange(96, dtype=torch.int32) // 32 - 1}, "must put 32 of the 96 inputs"),
    ],
)
def test_damaged_zero_points_and_orders_are_named(change: dict[str, Tensor], message: str) -> None:
    perm = torch.randperm(96, generator=generator())
    tensors = int4.to_tensors(reorder(int4.pack(weights(7, 96), 32, symmetric=False), perm), "x")
    assert int4.from_tensors(tensors, "x").perm is not None
    with pytest.raises(UserError, match=message):
        int4.from_tensors(tensors | change, "x")


def test_int8_zero_points_are_read_in_both_layouts() -> None:
    weight = weights(12, 96)
    for form, groups in (("int-quantized", [0]), ("pack-quantized", [0, 32])):
        for group in groups:
            scheme = library_scheme(8, group, False)
            stored, dense = library_compresses(weight, scheme, torch.bfloat16, form)
            config = CONFIG | {"format": form, "config_groups": {"g": scheme.model_dump()}}
            formats.check_supported(config)
            packed = formats.read(config, named(stored, "x"), "x")
            assert isinstance(packed, PackedWeight) and packed.offset is not None
            assert packed.scheme == Scheme("int8", 8, group, False, "float")
            assert torch.equal(formats.dequantize(packed), dense)
            with pytest.raises(ValueError, match="symmetric int8 rows"):
                int8.to_tensors(packed, "x")
    plain = int8.to_tensors(int8.pack(weight), "x") | {"x.weight_zero_point": torch.zeros(12, 1, dtype=torch.int8)}
    assert int8.from_tensors(plain, "x").scheme == int8.scheme() and int8.from_tensors(plain, "x").offset is None


def test_static_scales_are_checked() -> None:
    packed = int8.pack(weights(4, 32), input_scale=0.3)
    assert packed.scheme == int8.scheme("int8-tensor")
    assert packed.input_scale is not None and float(packed.input_scale) == float(torch.tensor(0.3).bfloat16())
    tensors = int8.to_tensors(packed, "x")
    back = int8.from_tensors(tensors | {"x.input_zero_point": torch.zeros(1, dtype=torch.int8)}, "x", "int8-tensor")
    assert back.input_scale is not None and torch.equal(back.input_scale, packed.input_scale)
    for change, message in (
        ({"x.input_zero_point": torch.ones(1, dtype=torch.int8)}, "x.input_zero_point: static inputs"),
        ({"x.input_scale": torch.zeros(1)}, "x.input_scale must be positive, found 0"),
        ({"x.input_scale": torch.full((1,), float("nan"))}, "x.input_scale must be finite"),
        ({"x.input_scale": torch.ones(2)}, "x.input_scale has shape"),
    ):
        with pytest.raises(UserError, match=message):
            int8.from_tensors(tensors | change, "x", "int8-tensor")
    for wrong in (0.0, -1.0, float("inf"), torch.ones(2)):
        with pytest.raises(ValueError, match="one positive number"):
            int8.pack(weights(4, 32), input_scale=wrong)


def test_experts_are_written_only_as_transformers_fuses_them() -> None:
    name = "model.layers.0.mlp.experts.3.up_proj"
    assert formats.hf_config({name: int4.scheme(32, bits=3)})
    for scheme, reordered in (
        (int4.scheme(32, symmetric=False), []),
        (int8.scheme("int8-tensor"), []),
        (int4.scheme(32), [name]),
    ):
        with pytest.raises(ValueError, match="transformers fuses experts that are symmetric"):
            formats.hf_config({name: scheme}, reordered=reordered)


def test_a_reordered_layer_has_a_group_of_its_own() -> None:
    layers = {f"model.layers.{i}.mlp.up_proj": int4.scheme(32) for i in range(2)}
    groups = formats.hf_config(layers, reordered=["model.layers.1.mlp.up_proj"])["config_groups"]
    assert [g["weights"].get("actorder") for g in groups.values()] == [None, "group"]
    assert [g["targets"] for g in groups.values()] == [[name] for name in layers]
    assert len(formats.hf_config(layers)["config_groups"]) == 1
