"""Whole models in both directions: compressed-tensors and transformers load exactly what was packed, and what the
library saved is read exactly. Mixed bits, static int8 and activation order.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import formats
from runtime.checkpoints.open import open_checkpoint
from runtime.formats import int4, int8
from runtime.formats.packed import PackedWeight
from tests.runtime.formats.compressed_tensors_library import Tiny, compressor, generator

transformers = pytest.importorskip("transformers")


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
