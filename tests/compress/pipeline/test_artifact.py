"""From a model to an artifact: what is quantised, what stays as it is, and who loads it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact import manifest
from compress.errors import UserError
from compress.export import FORMATS
from compress.export import run as export
from compress.recipe import Recipe
from runtime import load
from runtime.bench.digest import digests
from runtime.checkpoints.open import open_checkpoint
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight
from runtime.kernels.dispatch import choose
from tests.compress.pipeline.small_runs import Tiny, damaged, recipe, refusal

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "qwen3_moe", "gpt2")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_tensor_is_quantised_or_listed(tiny: Tiny, go: Any, kind: str) -> None:
    artifact, facts = go(tiny(kind))
    original, compressed = open_checkpoint(tiny(kind)), open_checkpoint(artifact.model)
    packed = {layer.name for layer in facts.layers}
    kept = [name for name in original.names() if name.removesuffix(".weight") not in packed]
    for name in kept:
        assert torch.equal(original.tensor(name), compressed.tensor(name))
    for layer in facts.layers:
        weight = compressed.weight(layer.name)
        assert isinstance(weight, PackedWeight)
        exact = original.tensor(f"{layer.name}.weight")
        exact = exact.T if kind == "gpt2" else exact
        error = (exact - dequantize(weight)).norm() / exact.norm()
        assert layer.error == pytest.approx(float(error), rel=1e-5)
        assert 0.05 < layer.error < 0.12
        stored = [n for n in compressed.names() if n.startswith(f"{layer.name}.") and not n.endswith(".bias")]
        assert layer.stored_bytes == sum(t.numel() * t.element_size() for t in map(compressed.tensor, stored))
    expected = {"phi3": 4, "gpt2": 4, "mixtral": 4, "qwen3_moe": 4}.get(kind, 7)
    assert len(packed) == 2 * expected
    listed = sum(int(e.layer.rpartition(" (")[2][:-1]) if e.layer.endswith(")") else 1 for e in facts.left_alone)
    tied = {"llama", "gemma", "gpt2"}
    assert listed == len(kept) + (kind in tied)
    assert any("tied to" in entry.why for entry in facts.left_alone) == (kind in tied)
    assert ("lm_head.weight" in compressed.names()) == (kind not in tied)
    assert all(entry.why for entry in facts.left_alone)
    artifact.verify()


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("llama", "nf4"),
        ("gpt2", "nf4"),
        ("phi3", "int8-dynamic"),
        ("qwen3", "int4-rtn"),
        ("mixtral", "int4-rtn"),
        ("mixtral", "int8-dynamic"),
    ],
)
def test_transformers_loads_the_artifact(tiny: Tiny, go: Any, kind: str, scheme: str) -> None:
    pytest.importorskip("bitsandbytes" if scheme == "nf4" else "compressed_tensors")
    from transformers import AutoModelForCausalLM

    artifact, facts = go(tiny(kind), scheme)
    if kind == "qwen3":
        assert {layer.group_size for layer in facts.layers} == {64, 128}
    tokens = torch.tensor([[5, 99, 14, 300, 7, 123, 200, 31]])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tiny(kind), dtype=torch.float32)(tokens).logits
        found = AutoModelForCausalLM.from_pretrained(artifact.model, dtype=torch.float32)(tokens).logits
    distance = float((found - expected).norm() / expected.norm())
    # Random weights: the error of nf4 is about 9 % in every layer, and a router may choose other experts.
    assert 1e-4 < distance < (0.1 if scheme == "int8-dynamic" else 0.5)


def test_fp8_is_loaded_exactly_and_counted(tiny: Tiny, go: Any) -> None:
    """qwen2 has layers with a bias."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    artifact, facts = go(tiny("qwen2"), "fp8")
    checkpoint = open_checkpoint(artifact.model)
    assert {layer.scheme for layer in facts.layers} == {"fp8"} and len(facts.layers) == 14
    tokens = torch.tensor([[5, 99, 14, 300, 7, 123, 200, 31]])
    loaded = AutoModelForCausalLM.from_pretrained(artifact.model, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(tiny("qwen2"), dtype=torch.float32)
    modules = dict(plain.named_modules())
    with torch.no_grad():
        found = loaded(tokens).logits
        for layer in facts.layers:
            packed = checkpoint.weight(layer.name)
            assert isinstance(packed, PackedWeight) and packed.codes.dtype == torch.float8_e4m3fn
            assert torch.equal(loaded.get_submodule(layer.name).weight, dequantize(packed))
            assert (packed.bias is None) == (modules[layer.name].bias is None)
            stored = [name for name in checkpoint.names() if name.startswith(f"{layer.name}.weight")]
            assert layer.stored_bytes == sum(checkpoint.tensor(name).nbytes for name in stored)
            assert layer.stored_bytes == layer.weights + 2 * packed.shape[0] and layer.error < 0.04
            modules[layer.name].weight.copy_(dequantize(packed))
        assert torch.equal(plain(tokens).logits, found)


def test_fp8_leaves_mixtures_and_other_forms_alone(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    message = refusal(tmp_path, lambda: go(tiny("mixtral"), "fp8"))
    assert "beside fp8 layers transformers joins no such tensors" in message
    artifact, _ = go(tiny("llama"), "fp8")
    for form in FORMATS:
        if form != "compressed-tensors":
            with pytest.raises(UserError, match=f"export {form}: expected weights other than fp8"):
                export(form, artifact.model, tmp_path / form)
    exported = export("compressed-tensors", artifact.model, tmp_path / "same")
    assert not exported.losses and (tmp_path / "same" / "config.json").is_file()


def test_rows_that_no_group_divides_stay_and_load(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny("llama", intermediate_size=200)
    tokens = torch.tensor([[5, 99, 14, 300]])
    for scheme, layers in (("nf4", 8), ("int4-rtn", 12)):
        artifact, facts = go(model, scheme, out=tmp_path / scheme)
        assert len(facts.layers) == layers
        why = {entry.layer: entry.why for entry in facts.left_alone}
        assert "200 weights are no multiple of" in why["model.layers.*.mlp.down_proj.weight (2)"]
        loaded = AutoModelForCausalLM.from_pretrained(artifact.model, dtype=torch.float32)
        assert type(loaded.model.layers[1].mlp.down_proj) is torch.nn.Linear
        # Without gradients bitsandbytes runs kernels of its own, which take outputs in thirty-twos.
        with torch.inference_mode():
            assert torch.isfinite(loaded(tokens).logits).all()
    _, facts = go(tiny("llama", intermediate_size=160), "int4-rtn", out=tmp_path / "small")
    assert {layer.group_size for layer in facts.layers} == {64, 32}


def test_targets_and_ignore(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    own = recipe(tmp_path, scheme="int8-dynamic", targets=["mlp"], ignore=[r"layers\.0\..*down"])
    artifact, facts = go(tiny("llama"), own)
    assert {layer.name for layer in facts.layers} == {
        *(f"model.layers.{i}.mlp.{kind}_proj" for i in (0, 1) for kind in ("gate", "up")),
        "model.layers.1.mlp.down_proj",
    }
    why = {entry.layer: entry.why for entry in facts.left_alone}
    assert "ignores" in why["model.layers.0.mlp.down_proj.weight"]
    assert why["model.layers.*.self_attn.q_proj.weight (2)"] == "not among the recipe's targets"
    ignored = json.loads((artifact.model / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.down_proj" in ignored and "lm_head" in ignored
    typo = recipe(tmp_path, scheme="nf4", ignore=["donw_proj"])
    message = refusal(tmp_path, lambda: go(tiny("llama"), typo, out=tmp_path / "x"))
    assert "'donw_proj' matches no linear layer" in message


def test_head_int8_is_for_heads_of_their_own(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    own = recipe(tmp_path, scheme="int8-dynamic", head="int8")
    artifact, facts = go(tiny("mistral"), own)
    assert "lm_head" in {layer.name for layer in facts.layers}
    tokens = torch.tensor([[5, 99, 14, 300]])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tiny("mistral"), dtype=torch.float32)(tokens).logits
        found = AutoModelForCausalLM.from_pretrained(artifact.model, dtype=torch.float32)(tokens).logits
    assert float((found - expected).norm() / expected.norm()) < 0.05
    assert "tied to its embedding" in refusal(tmp_path, lambda: go(tiny("llama"), own, out=tmp_path / "x"))


def test_what_no_loader_reads_is_refused(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    message = refusal(tmp_path, lambda: go(tiny("gpt2"), "int8-dynamic"))
    assert "Conv1D" in message and "nf4" in message
    own = recipe(tmp_path, scheme="int4", ignore=["experts"])
    assert "experts" in refusal(tmp_path, lambda: go(tiny("mixtral"), own))


def test_16_bit_weights_keep_their_dtype(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}

    artifact, _ = go(damaged(tiny("llama"), tmp_path, halve), "int4-rtn")
    stored = open_checkpoint(artifact.model)
    assert stored.tensor("model.embed_tokens.weight").dtype == torch.bfloat16
    assert stored.tensor("model.layers.0.mlp.up_proj.weight_scale").dtype == torch.bfloat16


def test_names_without_the_body_prefix(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    """GPT-2's own files leave out `transformer.`, and carry causal masks."""

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()

    artifact, facts = go(damaged(tiny("gpt2"), tmp_path, strip))
    assert len(facts.layers) == 8
    assert "h.0.attn.c_attn" in {layer.name for layer in facts.layers}
    assert any(entry.layer == "h.0.attn.bias" for entry in facts.left_alone)
    assert open_checkpoint(artifact.model).tensor("h.0.attn.bias").shape == (1, 1, 8, 8)


def test_a_tied_copy_in_the_file_is_dropped(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    def repeat(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    artifact, facts = go(damaged(tiny("llama"), tmp_path, repeat))
    assert "lm_head.weight" not in open_checkpoint(artifact.model).names()
    assert any(entry.layer == "lm_head.weight" and "dropped" in entry.why for entry in facts.left_alone)


def test_equal_runs_are_equal_bytes(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    for name in ("one", "other"):
        go(tiny("mistral"), out=tmp_path / name, draft=str(tiny("llama")), seed=5)
    one, other = ((tmp_path / name / manifest.NAME).read_bytes() for name in ("one", "other"))
    assert one == other
    assert str(tmp_path).encode() not in one
    content = manifest.read(tmp_path / "one")
    assert (content["seed"], content["draft"]) == (5, "llama")
    assert content["calibration"] == {"samples_requested": 2, "samples_used": 0}
    logits = content["logits"]
    if choose("auto", "cpu").everywhere:
        assert logits == {"sha256": digests(load(tmp_path / "other", threads=1).decoder), "why": None}
    else:
        assert logits["sha256"] is None and "plain-torch" in logits["why"]
    assert Recipe.load(tmp_path / "one" / "recipe.yaml") == Recipe.load("nf4")


def test_shards_hold_the_same_tensors(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    whole, _ = go(tiny("llama"), out=tmp_path / "whole")
    split, _ = go(tiny("llama"), out=tmp_path / "split", shard_bytes=40_000)
    files = sorted(path.name for path in split.model.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    one, many = open_checkpoint(whole.model), open_checkpoint(split.model)
    assert one.names() == many.names()
    assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.names())
    index = json.loads((split.model / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(many.tensor(n).nbytes for n in many.names())


def test_the_draft_is_copied_whole(tiny: Tiny, go: Any) -> None:
    draft = tiny("mistral", seed=1)
    (draft / "modeling_evil.py").write_text("raise SystemExit")
    (draft / "weights.bin").write_bytes(b"pickle")
    artifact, facts = go(tiny("llama"), draft=str(draft))
    assert artifact.draft is not None and facts.draft == facts.folder / "draft"
    names = {path.name for path in artifact.draft.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"modeling_evil.py", "weights.bin"}
    a, b = open_checkpoint(draft), open_checkpoint(artifact.draft)
    assert all(torch.equal(a.tensor(name), b.tensor(name)) for name in a.names())
