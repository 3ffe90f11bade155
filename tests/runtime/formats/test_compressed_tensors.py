"""compressed-tensors in both directions: what its compressor wrote is read exactly, and what we write it loads exactly.

Zero points, 2 to 6 bits, mixed bits, static int8 and activation order. (test_int8_int4.py has the rest.)
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import formats
from runtime.checkpoints.open import open_checkpoint
from runtime.errors import UserError
from runtime.formats import codes as words
from runtime.formats import dequantize, int4, int8
from runtime.formats.packed import PackedWeight, Scheme

quantization = pytest.importorskip("compressed_tensors.quantization")
transformers = pytest.importorskip("transformers")

Tiny = Callable[..., Path]
# More than 8 rows: the library stumbles over its own zero points of 4 bits where they fit a single word.
SHAPES = [(24, 256), (13, 96), (33, 160), (9, 32)]
CONFIG = {"quant_method": "compressed-tensors"}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    """float32 rows whose ranges lie on both sides of 0, above it and below it: zero points at both ends."""
    centre = torch.tensor([0.0, 0.2, -0.2, 0.02])[torch.arange(n) % 4].unsqueeze(1)
    return torch.randn(n, k, generator=generator(seed)) * 0.05 + centre


def library_scheme(bits: int, group: int, symmetric: bool) -> Any:
    args = quantization.QuantizationArgs(
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="group" if group else "channel",
        group_size=group or None,
    )
    return quantization.QuantizationScheme(targets=["Linear"], weights=args)


def compressor(form: str) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(form)


def library_compresses(weight: Tensor, scheme: Any, dtype: torch.dtype, form: str) -> tuple[dict[str, Tensor], Tensor]:
    """The library's own ranges, codes and bytes for a weight, and the weights that it makes of them, float32."""
    from compressed_tensors.quantization.utils import calculate_qparams

    size = scheme.weights.group_size or weight.shape[1]
    grouped = weight.view(weight.shape[0], -1, size)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
    given_ = {"weight": weight, "weight_scale": scale.to(dtype).float()}
    if not scheme.weights.symmetric:
        given_["weight_zero_point"] = zero
    stored = compressor(form).compress(given_, scheme)
    dense = compressor(form).decompress(stored, scheme)["weight"]
    return stored | {"weight_scale": stored["weight_scale"].to(dtype)}, dense


def named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


# Single layers, from the library and to it.


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


# Activation order.


def reorder(packed: PackedWeight, perm: Tensor) -> PackedWeight:
    """The same codes, of which column j now belongs to input perm[j]."""
    return dataclasses.replace(packed, perm=perm)


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


# Whole models.


def model_of(tiny: Tiny, kind: str, **changes: Any) -> Path:
    return tiny(kind, attention_bias=True, **changes) if kind == "llama" else tiny(kind, **changes)


def write(source: Path, out: Path, pack: Callable[[str, Tensor], PackedWeight], shards: int = 1) -> dict[str, Tensor]:
    """Packs every projection of `source`; returns the dense weights that stand for them."""
    stored, dense, schemes, reordered = {}, {}, {}, []
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        prefix = name.removesuffix(".weight")
        if name.endswith("_proj.weight"):
            packed = pack(prefix, tensor)
            stored |= formats.to_tensors(packed, prefix, torch.float32)
            dense[prefix], schemes[prefix] = formats.dequantize(packed), packed.scheme
            if packed.perm is not None:
                reordered.append(prefix)
        else:
            stored[name] = tensor
    out.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = formats.hf_config(schemes, ["lm_head"], reordered=reordered)
    (out / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
        return dense
    files = {name: f"model-0000{i % shards + 1}-of-0000{shards}.safetensors" for i, name in enumerate(sorted(stored))}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in stored.items() if files[name] == file}
        save_file(part, out / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return dense


def library_loads(path: Path, **options: Any) -> dict[str, Tensor]:
    """The weights of every linear module in the blocks, as `from_pretrained` has them when the model runs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    return {name: m.weight.data for name, m in model.named_modules() if name.endswith("_proj")}


def library_reads(path: Path) -> dict[str, Tensor]:
    """The same by the library alone: its configuration says which scheme each module has, its compressor decompresses.

    transformers with compressed-tensors 0.20 expects zero points in another shape than the compressor writes, so this
    is the way to whole models with zero points.
    """
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    config = transformers.AutoConfig.from_pretrained(path)
    parsed = QuantizationConfig.model_validate(config.quantization_config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    apply_quantization_config(model, parsed)
    stored: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        stored |= load_file(file)
    dense = {}
    for name, module in model.named_modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is None:
            continue
        local = {n.removeprefix(f"{name}."): t for n, t in stored.items() if n.startswith(f"{name}.")}
        local["weight_scale"] = local["weight_scale"].float()
        dense[name] = compressor(scheme.format or parsed.format).decompress(local, scheme)["weight"]
    return dense


def _mixed(prefix: str, weight: Tensor, symmetric: bool = False) -> PackedWeight:
    if "down_proj" in prefix:
        return int8.pack(weight, input_scale=0.031)
    if "o_proj" in prefix:
        return int8.pack(weight)
    if ".0." in prefix and "gate" in prefix:
        return int4.pack(weight, 64, symmetric=symmetric)
    if "up_proj" in prefix:
        return int4.pack(weight, 32, bits=2, symmetric=symmetric)
    return int4.pack(weight, 32 if "q_proj" in prefix else 0, bits=3)


PACKS: dict[str, Callable[[str, Tensor], PackedWeight]] = {
    "int4 zero points": lambda _, w: int4.pack(w, 32, symmetric=False),
    "int4 rows": lambda _, w: int4.pack(w, 0, symmetric=False),
    "int6": lambda _, w: int4.pack(w, 64, bits=6),
    "int5": lambda _, w: int4.pack(w, 32, bits=5),
    "int3": lambda _, w: int4.pack(w, 64, bits=3),
    "int3 rows": lambda _, w: int4.pack(w, 0, bits=3),
    "int2": lambda _, w: int4.pack(w, 32, bits=2),
    "int2 zero points": lambda _, w: int4.pack(w, 32, bits=2, symmetric=False),
    "int8 static": lambda p, w: int8.pack(w, input_scale=0.02 + len(p) / 1000),
    "mixed": _mixed,
    "mixed symmetric": lambda p, w: _mixed(p, w, symmetric=True),
}


@pytest.mark.parametrize("kind", PACKS)
def test_the_library_reads_exactly_the_weights_that_were_packed(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    """llama here is tied and has biases; sharded every other time."""
    dense = write(model_of(tiny, "llama"), tmp_path / "m", PACKS[kind], shards=1 + len(kind) % 2)
    loaded = library_reads(tmp_path / "m")
    assert loaded.keys() == dense.keys() and len(dense) == 14
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.tied
    for name, weight in dense.items():
        assert torch.equal(loaded[name], weight), name
        packed = checkpoint.weight(name)
        assert isinstance(packed, PackedWeight) and torch.equal(formats.dequantize(packed), weight)
        assert packed.scheme == PACKS[kind](name, weight).scheme
        assert (packed.bias is not None) == ("self_attn" in name)


@pytest.mark.parametrize("kind", ["int6", "int5", "int3", "int2", "int3 rows", "int8 static", "mixed symmetric"])
def test_transformers_loads_symmetric_models_exactly(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    dense = write(model_of(tiny, "llama"), tmp_path / "m", PACKS[kind], shards=1 + len(kind) % 2)
    loaded = library_loads(tmp_path / "m")
    assert loaded.keys() == dense.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in dense.items())


@pytest.mark.parametrize("kind", ["int4 zero points", "int4 rows", "int2 zero points"])
def test_transformers_loads_zero_points_when_it_is_told_to_dequantize(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    dense = write(model_of(tiny, "llama"), tmp_path / "m", PACKS[kind], shards=1 + len(kind) % 2)
    told = transformers.CompressedTensorsConfig(dequantize=True)
    loaded = library_loads(tmp_path / "m", quantization_config=told)
    assert loaded.keys() == dense.keys()
    # On this way it multiplies in the dtype of the scales: one rounding of our weights.
    assert all(torch.equal(loaded[name], weight.bfloat16().float()) for name, weight in dense.items())


@pytest.mark.parametrize("kind", ["qwen3", "phi3"])
def test_other_models_too(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    dense = write(model_of(tiny, kind), tmp_path / "a", lambda _, w: int4.pack(w, 32, bits=3, symmetric=False), 2)
    loaded = library_reads(tmp_path / "a")
    assert loaded.keys() == dense.keys() and len(dense) == (14 if kind == "qwen3" else 8)
    assert all(torch.equal(loaded[name], weight) for name, weight in dense.items())
    dense = write(model_of(tiny, kind), tmp_path / "b", lambda _, w: int4.pack(w, 64, bits=3), 2)
    loaded = library_loads(tmp_path / "b")
    assert all(torch.equal(loaded[name], weight) for name, weight in dense.items())


def test_static_inputs_are_rounded_as_the_library_rounds_them(tiny: Tiny, tmp_path: Path) -> None:
    from runtime.kernels.reference import packed_linear

    write(model_of(tiny, "llama"), tmp_path / "m", PACKS["int8 static"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        packed, module = open_checkpoint(tmp_path / "m").weight(name), model.get_submodule(name)
        assert isinstance(packed, PackedWeight) and packed.input_scale is not None
        assert float(module.input_scale) == float(packed.input_scale)
        x = torch.randn(9, packed.shape[1], generator=generator(5))
        ours = packed_linear(packed)(x)
        with torch.no_grad():
            theirs = module(x)
        assert torch.allclose(ours, theirs, atol=1e-5)
        module.quantization_enabled = False
        with torch.no_grad():
            assert float((module(x) - theirs).norm() / theirs.norm()) > 1e-3, "rounding shows"


def saved_by_the_library(source: Path, out: Path, groups: Mapping[str, Any], static: float) -> dict[str, Tensor]:
    """A model that compressed-tensors itself quantised, compressed and saved; the dense weights that it reads back."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    config = QuantizationConfig(config_groups=dict(groups), ignore=["lm_head"], quantization_status="initialized")
    apply_quantization_config(model, config)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        weight = module.weight.data.float()
        rows = weight.view(weight.shape[0], -1, scheme.weights.group_size or weight.shape[1])
        scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), scheme.weights)
        module.weight_scale.data.copy_(scale)
        module.weight_zero_point.data.copy_(zero)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(static)
    whole = ModelCompressor.from_pretrained_model(model)
    whole.compress_model(model)
    model.save_pretrained(out)
    whole.update_config(str(out))
    return library_reads(out)


def test_models_that_the_library_saved_are_read_exactly(tiny: Tiny, tmp_path: Path) -> None:
    weights_ = {"type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    static = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    groups = {
        "a": {"targets": [r"re:.*self_attn\.[qk]_proj$"], "weights": weights_ | {"num_bits": 4, "actorder": "static"}},
        "b": {"targets": [r"re:.*self_attn\.v_proj$"], "weights": weights_ | {"num_bits": 3}},
        "c": {"targets": [r"re:.*mlp\.up_proj$"], "weights": weights_ | {"num_bits": 2, "symmetric": True}},
        "d": {
            "targets": [r"re:.*mlp\.down_proj$"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": static,
        },
    }
    dense = saved_by_the_library(model_of(tiny, "llama"), tmp_path / "m", groups, 0.025)
    checkpoint = open_checkpoint(tmp_path / "m")
    kinds = set()
    assert len(dense) == 10 and all(len(weight) > 8 for weight in dense.values())
    for name, weight in dense.items():
        packed = checkpoint.weight(name)
        assert isinstance(packed, PackedWeight) and torch.equal(formats.dequantize(packed), weight), name
        kinds.add((packed.scheme.kind, packed.scheme.bits, packed.scheme.symmetric, packed.scheme.activation))
    assert kinds == {
        ("int4", 4, False, "int8-group"),
        ("int4", 3, False, "int8-group"),
        ("int4", 2, True, "int8-group"),
        ("int8", 8, True, "int8-tensor"),
    }
    assert isinstance(checkpoint.weight("model.layers.0.mlp.gate_proj"), Tensor)


# What does not fit.


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
