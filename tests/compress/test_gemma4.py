"""Gemma 4 through recipes: experts and embeddings are named as left alone, and caches keep what layers share once."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from compress import compress
from compress.errors import USER_ERRORS
from compress.stages import kv_cache
from runtime import Speculator, load
from runtime.contract import Rows
from runtime.model.base import BaseDecoder
from runtime.speculate import CacheOptions
from runtime.speculative.drafters.lookup import LookupDrafter
from tests.compress.tiny_architectures import make

OPTIONS: dict[str, Any] = {"speed": False, "eval_tokens": 64, "seq_len": 32, "samples": 4, "threads": 1}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("gemma4") / "source"
    make("gemma4_text", path)
    return path


def text(count: int, seed: int) -> Tensor:
    return torch.randint(1, 4096, (count,), generator=torch.Generator().manual_seed(seed))


def texts(path: Path, options: CacheOptions, drafter: Any) -> list[list[int]]:
    speculator = Speculator(load(path, threads=1), drafter, draft_length=3, cache=options)
    prompts = [text(20, seed).tolist() * 2 for seed in (1, 2)]
    return [list(found.tokens) for found in speculator.generate(prompts, max_new_tokens=16, stop=())]


@torch.inference_mode()
def test_a_calibrated_artifact_with_a_calibrated_cache(source: Path, tmp_path: Path) -> None:
    """Its layers are those of the blocks; transformers finds all of its tensors; drafts change no token."""
    recipe = "stages: [{quantize: {scheme: int4, group_size: 32, method: gptq}}]\nkv: {scheme: int4}\nname: tiny\n"
    (tmp_path / "tiny.yaml").write_text(recipe)
    folder = compress(source, tmp_path / "tiny.yaml", tmp_path / "run", **OPTIONS).path
    report = json.loads((folder / "report.json").read_text())
    packed = {layer["name"] for layer in report["quality"]["layers"]}
    assert {"model.layers.5.per_layer_projection", "model.layers.5.mlp.down_proj"} <= packed
    assert not any("router" in name or ".4.self_attn.k_proj" in name for name in packed)
    left = {entry["layer"].partition(" ")[0]: entry["why"] for entry in report["left_alone"]}
    assert left["model.embed_tokens_per_layer.weight"] == left["model.embed_tokens.weight"] == "an embedding"
    assert "outside the blocks" in left["model.per_layer_model_projection.weight"]
    assert "fused in three dimensions" in left["model.layers.*.experts.gate_up_proj"]
    # Two sliding layers of 2 heads of 16, one other of 1 of 32: those behind them keep nothing.
    assert report["size"]["kv_bytes_per_token"] == {"original": 4 * 2 * (64 + 32), "compressed": 96 + 4 * 2 * 5}
    given: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", **given)
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    tokens = text(24, 3)
    expected = model.eval()(input_ids=tokens[None]).logits[0]
    decoder = load(folder / "model", threads=1).decoder
    cache = decoder.new_cache()
    found = decoder.forward(tokens, Rows.chains([(cache.open(24), 0, 24)]), cache).logits
    # Ours round inputs, and a row may go to other experts.
    assert float(((found - expected).norm(dim=1) / expected.norm(dim=1)).median()) < 0.15
    for options in (CacheOptions("auto"), CacheOptions("auto", 8)):
        plain = texts(folder / "model", options, None)
        assert texts(folder / "model", options, LookupDrafter()) == plain
        assert texts(folder / "model", options, load(source, threads=1)) == plain


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_factors_stand_where_keys_are_kept(source: Path, tmp_path: Path, kind: kv_cache.Kind) -> None:
    windows = torch.stack([text(40, seed) for seed in (5, 6)])
    found = kv_cache.calibrate(source, kind, windows)
    assert {n: tuple(of.key_factor.shape) for n, of in found.layers.items()} == {0: (2, 16), 1: (1, 32), 2: (2, 16)}
    decoder = load(source, threads=1).decoder
    assert isinstance(decoder, BaseDecoder)
    for window in windows[:1]:
        cache = decoder.new_cache()
        request = cache.open(40)
        decoder.forward(window, Rows.chains([(request, 0, 40)]), cache)
    # The cache's layers stand shape by shape.
    for place, layer in enumerate((0, 2, 1)):
        keys = cache.read(place, request, 40)[0]
        assert (keys.abs().amax((0, 2, 3)) <= found.layers[layer].key_scale * 127.5 * 1.001).all()
    shutil.copytree(source, tmp_path / "model")
    kv_cache.attach(tmp_path / "model", found)
    native, plain = (load(tmp_path / "model", threads=1, kernels=kernels).decoder for kernels in ("auto", "reference"))
    logits = []
    for made in (native, plain):
        assert isinstance(made, BaseDecoder) and made.kv.kind == kind
        assert [tuple(part.shape) for part in made.kv.key_factors] == [(2, 2, 16), (1, 1, 32)]
        cache = made.new_cache(kind)
        logits.append(made.forward(windows[0], Rows.chains([(cache.open(40), 0, 40)]), cache).logits)
    assert torch.equal(*logits)


def test_blocks_that_read_each_other_are_not_taken_out(source: Path, tmp_path: Path) -> None:
    with pytest.raises(USER_ERRORS, match=r"do not depend on their number, found num_kv_shared_layers = 3"):
        compress(source, "depth-25", tmp_path / "run", **OPTIONS)
    assert not (tmp_path / "run").exists()
