import json
import resource
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compress.errors import UserError
from compress.report.facts import LayerRecord
from compress.report.size import (
    bits_per_weight,
    kv_bytes_per_token,
    measure,
    peak_memory_bytes,
    tensor_bytes,
    weight_bytes,
    weight_files,
)

LLAMA = {
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "dtype": "bfloat16",
}


def write_model(directory: Path, columns: int = 64, dtype: torch.dtype = torch.bfloat16, **config: object) -> Path:
    directory.mkdir()
    save_file({"a": torch.randn(32, columns).to(dtype), "b": torch.randn(7)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**LLAMA, **config}))
    return directory


def layer(weights: int, stored: int) -> LayerRecord:
    return LayerRecord("model.layers.0.mlp.up_proj", "nf4", 64, weights, stored, 0.1)


def test_measure(tmp_path) -> None:
    original, model, draft = (write_model(tmp_path / name, n) for name, n in (("o", 640), ("m", 160), ("d", 16)))
    sizes = [(d / "model.safetensors").stat().st_size for d in (original, model, draft)]
    found = measure(original, model, draft, [layer(1000, 500), layer(3000, 1600)])
    assert found["original_bytes"] == sizes[0]
    assert found["compressed_bytes"] == sizes[1]
    assert found["draft_bytes"] == sizes[2]
    assert found["ratio"] == sizes[0] / sizes[1]
    assert found["bits_per_weight"] == 8 * 2100 / 4000
    assert found["kv_bytes_per_token"] == {"original": 2 * 3 * 2 * 8 * 2, "compressed": 2 * 3 * 2 * 8 * 2}
    assert found["not_measured"] == {}
    assert json.loads(json.dumps(found)) == found


def test_what_is_not_there_is_null_with_a_reason(tmp_path) -> None:
    original = write_model(tmp_path / "o")
    model = write_model(tmp_path / "m", kv_lora_rank=512)
    found = measure(original, model, None, [])
    assert found["draft_bytes"] is found["bits_per_weight"] is found["kv_bytes_per_token"]["compressed"] is None
    assert set(found["not_measured"]) == {"draft_bytes", "bits_per_weight", "kv_bytes_per_token.compressed"}
    quantised = measure(original, original, None, [layer(64, 64)], kv_element_bytes=1.125)
    assert quantised["kv_bytes_per_token"] == {"original": 192, "compressed": 108}


def test_weights_are_the_shards_of_the_index(tmp_path) -> None:
    for name in ("one.safetensors", "two.safetensors", "consolidated.safetensors"):
        save_file({name[:3]: torch.randn(11, 3)}, tmp_path / name)
    assert len(weight_files(tmp_path)) == 3
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}})
    )
    assert [file.name for file in weight_files(tmp_path)] == ["one.safetensors", "two.safetensors"]
    assert weight_bytes(tmp_path) == sum((tmp_path / f"{n}.safetensors").stat().st_size for n in ("one", "two"))
    for shard, says in (
        ("../one.safetensors", "names of files beside it"),
        ("/etc/passwd", "names of files beside it"),
        ("three.safetensors", "which is not there"),
    ):
        index.write_text(json.dumps({"weight_map": {"a": shard}}))
        with pytest.raises(UserError, match=says):
            weight_files(tmp_path)
    for raw in ("{", "[]", "{}", '{"weight_map": [1]}'):
        index.write_text(raw)
        with pytest.raises(UserError, match="weight_map"):
            weight_files(tmp_path)


def test_a_directory_without_weights(tmp_path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(UserError, match=r"has no \*\.safetensors file"):
        weight_bytes(tmp_path)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn]
)
def test_tensor_bytes(tmp_path, dtype) -> None:
    tensors = {
        "x": torch.randn(5, 7).to(dtype),
        "scalar": torch.tensor(3).to(dtype),
        "none": torch.zeros(0, 4).to(dtype),
    }
    path = tmp_path / "t.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    assert tensor_bytes(path) == {name: t.numel() * t.element_size() for name, t in tensors.items()}


def test_tensor_bytes_of_broken_files(tmp_path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({"x": torch.randn(5, 7), "y": torch.randn(3)}, path)
    whole = path.read_bytes()
    assert tensor_bytes(path) == {"x": 140, "y": 12}
    for length in (0, 4, 8, 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"t\.safetensors"):
            tensor_bytes(path)

    def write(header: object, data: int) -> None:
        raw = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(range(data)))

    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write({"x": entry}, 8)
    assert tensor_bytes(path) == {"x": 8}
    for header, says in (
        ({"x": {**entry, "shape": [3]}}, "tensor x: expected 12 bytes"),
        ({"x": {**entry, "dtype": "F7"}}, "tensor x: expected dtype"),
        ({"x": {"dtype": "F32"}}, "tensor x: expected dtype"),
        ({"x": entry, "y": entry}, "expected"),
        ([entry], "no readable safetensors header"),
    ):
        write(header, 8)
        with pytest.raises(UserError, match=says):
            tensor_bytes(path)


def test_bits_per_weight_counts_all_layers_together() -> None:
    assert bits_per_weight([layer(100, 50), layer(300, 300)]) == 7.0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 2 * 3 * 2 * 8 * 2),
        ({"dtype": None, "torch_dtype": "float32"}, 2 * 3 * 2 * 8 * 4),
        ({"head_dim": 16}, 2 * 3 * 2 * 16 * 2),
        ({"num_key_value_heads": None}, 2 * 3 * 8 * 8 * 2),
        ({"num_key_value_heads": None, "multi_query": True}, 2 * 3 * 1 * 8 * 2),
        ({"text_config": {"num_hidden_layers": 5}}, 2 * 5 * 2 * 8 * 2),
        ({"dtype": "float8_e4m3fn"}, "the config's dtype float8_e4m3fn is none that a cache is kept in"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "some of the model's layers keep a state of fixed size",
        ),
        ({"num_hidden_layers": None}, "the config does not give layers"),
    ],
)
def test_kv_bytes_per_token(change, expected) -> None:
    found = kv_bytes_per_token({**LLAMA, **change})
    assert found.startswith(expected) if isinstance(found, str) else found == expected


def test_kv_bytes_per_token_is_what_a_cache_holds(tiny) -> None:
    """Against the keys and values that transformers really keeps."""
    from transformers import AutoModelForCausalLM

    for kind in ("llama", "qwen3", "gpt2"):
        path = tiny(kind)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        cache = model(torch.randint(300, (1, 9))).past_key_values
        held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
        assert kv_bytes_per_token(json.loads((path / "config.json").read_text()), 4) == held / 9


def test_peak_memory_covers_what_was_allocated() -> None:
    before = peak_memory_bytes()
    block = torch.randn(20_000_000)
    after = peak_memory_bytes()
    assert before is not None and after is not None
    assert after >= max(before, block.numel() * 4)
    assert after == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
