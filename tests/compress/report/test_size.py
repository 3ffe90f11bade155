import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compress.records import LayerRecord, RunFacts
from compress.report.schema import CacheBytes
from compress.report.size import bits_per_weight, measure, peak_memory_bytes, sparsity, weight_bytes
from runtime.errors import UserError
from runtime.formats import int4

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


def facts(original: Path, model: Path, draft: Path | None = None, layers=(), pruned=()) -> RunFacts:
    return RunFacts("m", None, original, model.parent, model, draft, tuple(layers), (), {}, None, pruned=pruned)


def test_measure(tmp_path) -> None:
    original, model, draft = (write_model(tmp_path / name, n) for name, n in (("o", 640), ("m", 160), ("d", 16)))
    sizes = [(d / "model.safetensors").stat().st_size for d in (original, model, draft)]
    found, missing = measure(facts(original, model, draft, [layer(1000, 500), layer(3000, 1600)]), (192, 108))
    assert found.original_bytes == sizes[0]
    assert found.compressed_bytes == sizes[1]
    assert found.draft_bytes == sizes[2]
    assert found.ratio == sizes[0] / sizes[1]
    assert found.bits_per_weight == 8 * 2100 / 4000
    assert found.kv_bytes_per_token == CacheBytes(original=192, compressed=108)
    assert missing == {}


def test_what_is_not_there_is_null_with_a_reason(tmp_path) -> None:
    original = write_model(tmp_path / "o")
    found, missing = measure(facts(original, original), (192, 192))
    assert found.draft_bytes is found.bits_per_weight is None
    assert set(missing) == {"size.draft_bytes", "size.bits_per_weight"}


def test_weights_are_all_shards_and_nothing_else(tmp_path) -> None:
    model = write_model(tmp_path / "m")
    shards = {"one.safetensors": "a", "two.safetensors": "b"}
    for file, name in shards.items():
        save_file({name: torch.randn(11, 3)}, model / file)
    index = {"weight_map": {name: file for file, name in shards.items()}}
    (model / "model.safetensors").rename(model / "consolidated.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(model) == sum((model / file).stat().st_size for file in shards)
    (model / "two.safetensors").unlink()
    with pytest.raises(UserError, match=r"two\.safetensors"):
        weight_bytes(model)


def test_bits_per_weight_counts_all_layers_together() -> None:
    assert bits_per_weight([layer(100, 50), layer(300, 300)]) == 7.0


def test_peak_memory_covers_what_was_allocated() -> None:
    before = peak_memory_bytes()
    block = torch.randn(20_000_000)
    after = peak_memory_bytes()
    assert before is not None and after is not None
    assert after >= max(before, block.numel() * 4)
    assert after <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def two_of_four(n: int, k: int) -> torch.Tensor:
    """Random weights of which the two smaller in every four are zero."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) + 3
    groups = weight.view(-1, 4)
    groups.scatter_(1, groups.abs().topk(2, dim=1, largest=False).indices, 0.0)
    return weight


def test_zeros_of_pruned_layers() -> None:
    weight = two_of_four(16, 64).to(torch.bfloat16)
    found = sparsity([weight, two_of_four(8, 32).to(torch.bfloat16)])
    values = 16 * 64 + 8 * 32
    assert found.layers == 2 and found.zero_share == 0.5 and found.value_bytes == 2 * values
    # Of every four bf16 values two and their two 2-bit places: 36 bits instead of 64.
    assert found.two_of_four_bytes == values // 4 * 36 // 8


def test_a_2_of_4_store_of_codes() -> None:
    packed = int4.pack(two_of_four(16, 64), 32)
    found = sparsity([packed])
    assert found.zero_share == 0.5 and found.value_bytes == 16 * 64 // 2
    assert found.two_of_four_bytes == 16 * 64 // 4 * 12 // 8


def test_zeros_anywhere_fit_no_2_of_4_store() -> None:
    weight = two_of_four(16, 64)
    weight[0, :4], weight[0, 4:8] = torch.tensor([1.0, 2.0, 3.0, 0.0]), 0.0
    found = sparsity([two_of_four(4, 8), weight])
    assert found.two_of_four_bytes is None and found.zero_share == pytest.approx(0.5, abs=0.01)
    assert sparsity([torch.zeros(3, 6)]).two_of_four_bytes is None  # rows that are no whole fours


def test_measure_looks_at_the_pruned_layers_of_the_artifact(tmp_path) -> None:
    original = write_model(tmp_path / "o")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(LLAMA))
    tensors = {"a.weight": two_of_four(8, 16), "b.weight": torch.ones(8, 16)}
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    found, missing = measure(facts(original, tmp_path / "m", pruned=("a",)), (1, 1))
    assert found.sparsity.zero_share == 0.5 and found.sparsity.two_of_four_bytes is not None
    found, missing = measure(facts(original, tmp_path / "m", pruned=("a", "b")), (1, 1))
    assert found.sparsity.zero_share == 0.25
    assert "two in every four" in missing["size.sparsity.two_of_four_bytes"]
    assert measure(facts(original, tmp_path / "m"), (1, 1))[0].sparsity is None
