"""The GGUF export: read back by us, by the gguf package and by transformers. It needs the gguf package."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.errors import UserError
from compress.export import Exported, run, silent
from compress.export.gguf.blocks import choose, loss, pack, read_back
from compress.export.gguf.file import write
from runtime import formats, load
from runtime.checkpoints.gguf.checkpoint import GgufCheckpoint, open_gguf
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.errors import UserError as RuntimeUserError
from runtime.formats import int4, int8, nf4, ternary, three_of_four
from runtime.formats.packed import PackedWeight, Scheme

gguf = pytest.importorskip("gguf")

FAMILY = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma")
WORDS = torch.tensor([5, 80, 7, 301, 64, 2, 2, 19])


@pytest.fixture(scope="session")
def splitting(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The tiny model of a kind, its tokenizer splitting text like GPT-2's, which llama.cpp has a name for."""

    def get(kind: str, **changes: Any) -> Path:
        out = tmp_path_factory.mktemp("model") / kind
        # llama.cpp's Qwen3-MoE has no other way of weighing experts.
        shutil.copytree(tiny(kind, **(changes | ({"norm_topk_prob": True} if kind == "qwen3_moe" else {}))), out)
        content = json.loads((out / "tokenizer.json").read_text())
        content["pre_tokenizer"]["use_regex"] = True
        (out / "tokenizer.json").write_text(json.dumps(content))
        return out

    return get


def exported(model: Path, out: Path, **options: Any) -> tuple[Path, Exported]:
    out.mkdir()
    result = write(model, out, silent, **options)
    (file,) = out.iterdir()
    assert result.bytes == file.stat().st_size
    return file, result


def logits(path: Path, **options: Any) -> Tensor:
    decoder = load(path, **options).decoder
    cache = decoder.new_cache()
    return decoder.forward(WORDS, Rows.chains([(cache.open(len(WORDS)), 0, len(WORDS))]), cache).logits


@pytest.mark.parametrize("kind", FAMILY)
def test_a_float_model_comes_back_as_it_was(kind: str, splitting: Callable[..., Path], tmp_path: Path) -> None:
    model = splitting(kind)
    file, result = exported(model, tmp_path / "out")
    assert result.losses == () and result.repacked > 0
    ours, theirs = open_checkpoint(file), open_checkpoint(model)
    for name in theirs.names():
        if ".experts." not in name and "block_sparse_moe" not in name:
            found, wanted = ours.tensor(name).float(), theirs.tensor(name).float()
            # Gemma's norms have gone through 1 + w.
            exact = kind != "gemma" or "norm" not in name
            assert torch.equal(found, wanted) if exact else torch.allclose(found, wanted, atol=1e-6), name
    if kind == "gemma":
        assert torch.allclose(logits(file), logits(model), atol=1e-4)
    else:
        assert torch.equal(logits(file), logits(model))


# Mixtral and Gemma transformers does not read; of Qwen3 it takes heads of 128 alone.
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "phi3"])
def test_transformers_loads_the_file(kind: str, splitting: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = splitting(kind)
    file, _ = exported(model, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).state_dict()
    wanted = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    assert theirs.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(theirs[name], tensor), name


def test_floats_may_be_asked_for_as_one_type(splitting: Callable[..., Path], tmp_path: Path) -> None:
    model = splitting("llama", seed=3)
    bfloat = tmp_path / "bfloat"
    shutil.copytree(model, bfloat)
    tensors = load_file(model / "model.safetensors")
    save_file({k: v.bfloat16() for k, v in tensors.items()}, bfloat / "model.safetensors", metadata={"format": "pt"})
    for floats, kind, exact in (("keep", "BF16", True), ("f32", "F32", True), ("f16", "F16", False)):
        file, result = exported(bfloat, tmp_path / floats, floats=floats)
        assert {t.tensor_type.name for t in gguf.GGUFReader(file).tensors if len(t.shape) == 2} == {kind}
        # bfloat16's small numbers are below float16's normal ones.
        assert (result.losses == ()) == exact and all(entry.error < 1e-4 for entry in result.losses)


def _groups(kind: str, n: int, k: int, size: int, *, offset: bool = False, half: bool = True) -> PackedWeight:
    """Random codes over the whole range of the kind, and scales that float16 holds, or that it does not."""
    rng = torch.Generator().manual_seed(n + k)
    bits, (low, high) = {"int4": (4, (-8, 8)), "int8": (8, (-128, 128)), "ternary": (2, (-1, 2)), "nf4": (4, (0, 16))}[
        kind
    ]
    codes = torch.randint(low, high, (n, k), generator=rng).to(torch.int8)
    scale = torch.rand(n, k // size if size else 1, generator=rng) * 0.1 + 0.01
    scale = scale.half().float() if half else scale
    zeros = torch.randint(low, high, scale.shape, generator=rng) * scale if offset else None
    scheme = Scheme(kind, bits, size, not offset, "int8-group")  # type: ignore[arg-type]
    return PackedWeight(scheme, codes, scale, offset=zeros)


REPACKED = {
    "int4 groups": (_groups("int4", 5, 96, 32), "Q4_0"),
    "int4 larger groups": (_groups("int4", 3, 256, 128), "Q4_0"),
    "int4 rows": (_groups("int4", 7, 160, 0), "Q4_0"),
    "int8 rows": (_groups("int8", 9, 96, 0), "Q8_0"),
    "int8 groups": (_groups("int8", 2, 128, 64), "Q8_0"),
    "ternary": (_groups("ternary", 5, 512, 0), "TQ2_0"),
    "ternary of other sizes": (_groups("ternary", 5, 96, 0), "Q4_0"),
    "no blocks": (_groups("int8", 5, 33, 0), "F32"),
    "int6": (int4.pack(torch.randn(4, 64).half(), 32, bits=6), "Q8_0"),
    "int2": (int4.pack(torch.randn(4, 64).half(), 32, bits=2), "Q4_0"),
}


@pytest.mark.parametrize("weight, kind", REPACKED.values(), ids=REPACKED)
def test_codes_are_repacked_where_blocks_hold_them(weight: PackedWeight, kind: str) -> None:
    chosen = choose(weight)
    assert chosen.name == kind
    rows = pack("layer", weight, chosen)
    assert loss(weight, rows, chosen) == 0.0
    wanted = formats.dequantize(weight).numpy()
    assert np.array_equal(read_back(rows, chosen), wanted)
    raw = rows if kind != "F32" else rows.view(np.float32)
    assert np.array_equal(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(chosen.number)), wanted)


ROUNDED = {
    "scales wider than float16": (_groups("int4", 5, 96, 32, half=False), "Q4_0", 5e-4),
    "ternary scales": (ternary.pack(torch.randn(6, 256)), "TQ2_0", 5e-4),
    "int8 scales": (_groups("int8", 5, 96, 0, half=False), "Q8_0", 5e-4),
    "zero points": (_groups("int4", 5, 96, 32, offset=True), "Q4_1", 1e-3),
    "nf4": (nf4.pack(torch.randn(6, 128)).plain(), "Q8_0", 1e-2),
    "order": (
        PackedWeight(
            _groups("int4", 5, 96, 32).scheme,
            *[getattr(_groups("int4", 5, 96, 32), n) for n in ("codes", "scale")],
            perm=torch.randperm(96),
        ),
        "Q8_0",
        1e-2,
    ),
    "small groups": (_groups("int8", 3, 96, 16), "Q8_0", 2e-2),
    "int8 zero points": (_groups("int8", 3, 96, 32, offset=True), "Q8_0", 2e-2),
}


@pytest.mark.parametrize("weight, kind, most", ROUNDED.values(), ids=ROUNDED)
def test_what_is_rounded_is_measured(weight: PackedWeight, kind: str, most: float) -> None:
    chosen = choose(weight)
    assert chosen.name == kind
    rows = pack("layer", weight, chosen)
    wanted = formats.dequantize(weight).numpy()
    found = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(chosen.number))
    error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    assert 0 < error < most
    assert loss(weight, rows, chosen) == pytest.approx(error, rel=1e-3)


def test_scales_that_float16_cannot_hold_are_refused() -> None:
    large = _groups("int8", 2, 32, 0)
    assert pack("layer", large, choose(large)).shape == (2, 34)
    huge = PackedWeight(large.scheme, large.codes, large.scale * 1e7)
    with pytest.raises(UserError, match="layer: GGUF's blocks have float16 scales"):
        pack("layer", huge, choose(huge))


def _packed(source: Path, out: Path, make: Callable[[Tensor], PackedWeight], dtype: torch.dtype) -> Path:
    shutil.copytree(source, out)
    written: dict[str, Tensor] = {}
    schemes = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        prefix = name.removesuffix(".weight")
        if name.endswith("_proj.weight"):
            packed = make(tensor)
            written |= formats.to_tensors(packed, prefix, dtype)
            schemes[prefix] = packed.scheme
        else:
            written[name] = tensor.to(dtype)
    save_file(written, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = formats.hf_config(schemes, ["lm_head"])
    (out / "config.json").write_text(json.dumps(config))
    return out


FORMS: dict[str, tuple[Callable[[Tensor], PackedWeight], str, bool]] = {
    "int4": (lambda w: int4.pack(w.bfloat16(), 32), "Q4_0", True),
    "int8": (lambda w: int8.pack(w.bfloat16()), "Q8_0", True),
    "int8 static": (lambda w: int8.pack(w.bfloat16(), input_scale=0.05), "Q8_0", True),
    "nf4": (lambda w: nf4.pack(w.bfloat16()), "Q8_0", False),
    "ternary": (lambda w: ternary.pack(w.bfloat16()), "Q4_0", False),
    "ternary-1.25": (lambda w: three_of_four.pack(w.bfloat16()), "Q4_0", True),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_artifact_keeps_its_codes(form: str, splitting: Callable[..., Path], tmp_path: Path) -> None:
    make, kind, exact = FORMS[form]
    model = _packed(splitting("qwen2"), tmp_path / "model", make, torch.bfloat16)
    file, result = exported(model, tmp_path / "out")
    ours, theirs = open_gguf(file), open_checkpoint(model)
    errors = {entry.layer: entry.error for entry in result.losses}
    tensors = {t.name: t for t in gguf.GGUFReader(file).tensors}
    assert tensors["blk.0.attn_q.weight"].tensor_type.name == kind
    assert (errors == {}) == exact and result.repacked + len(errors) == 14 + (not theirs.tied)
    for number in range(2):
        for layer in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
            prefix = f"model.layers.{number}.{layer}"
            found, wanted = ours.weight(prefix), theirs.weight(prefix)
            assert isinstance(found, PackedWeight) and isinstance(wanted, PackedWeight)
            a, b = formats.dequantize(found), formats.dequantize(wanted)
            error = float((a - b).norm() / b.norm())
            assert error == pytest.approx(errors.get(prefix, 0.0), rel=1e-2, abs=1e-9)
            assert (found.bias is None) == (wanted.bias is None)
            if found.bias is not None and wanted.bias is not None:
                assert torch.equal(found.bias, wanted.bias)
            if exact:
                assert torch.equal(found.codes, wanted.codes)
    assert any("static input scales are left out" in note for note in result.notes) == (form == "int8 static")
    if form != "int8 static":
        difference = float((logits(file) - logits(model)).norm() / logits(model).norm())
        assert difference < 0.05


def test_experts_fused_on_disk_give_the_same_file(splitting: Callable[..., Path], tmp_path: Path) -> None:
    apart, fused = splitting("qwen3_moe"), splitting("qwen3_moe")
    tensors = load_file(fused / "model.safetensors")
    for number in range(2):
        base = f"model.layers.{number}.mlp.experts"
        parts = {
            part: torch.stack([tensors.pop(f"{base}.{index}.{part}_proj.weight") for index in range(4)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{base}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), dim=1)
        tensors[f"{base}.down_proj"] = parts["down"]
    save_file(tensors, fused / "model.safetensors", metadata={"format": "pt"})
    files = [exported(model, tmp_path / str(number))[0] for number, model in enumerate((apart, fused))]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_packed_experts_keep_their_codes(splitting: Callable[..., Path], tmp_path: Path) -> None:
    make = FORMS["int4"][0]
    model = _packed(splitting("qwen3_moe"), tmp_path / "model", make, torch.bfloat16)
    file, result = exported(model, tmp_path / "out")
    assert result.losses == () and result.repacked == 2 * (4 + 3 * 4) + 1
    stacks = [t for t in gguf.GGUFReader(file).tensors if "_exps" in t.name]
    assert {(t.tensor_type.name, len(t.shape)) for t in stacks} == {("Q4_0", 3)} and len(stacks) == 6
    name = "model.layers.1.mlp.experts.3.down_proj"
    found, wanted = open_gguf(file).weight(name), open_checkpoint(model).weight(name)
    assert isinstance(found, PackedWeight) and isinstance(wanted, PackedWeight)
    assert torch.equal(found.codes, wanted.codes) and torch.equal(found.scale, wanted.scale)
    assert float((logits(file) - logits(model)).norm() / logits(model).norm()) < 0.01


def test_rows_of_queries_and_keys_lie_as_llama_cpp_wants_them(splitting: Callable[..., Path], tmp_path: Path) -> None:
    model = splitting("llama")
    file, _ = exported(model, tmp_path / "out")
    stored = {t.name: np.array(t.data) for t in gguf.GGUFReader(file).tensors}
    weights = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    for part, heads in (("q", config["num_attention_heads"]), ("k", config["num_key_value_heads"])):
        ours = weights[f"model.layers.1.self_attn.{part}_proj.weight"].numpy()
        halves = ours.reshape(heads, 2, -1, ours.shape[1]).swapaxes(1, 2).reshape(ours.shape)
        assert np.array_equal(stored[f"blk.1.attn_{part}.weight"], halves)
    assert np.array_equal(stored["blk.1.attn_v.weight"], weights["model.layers.1.self_attn.v_proj.weight"].numpy())


def test_tied_and_untied_heads(splitting: Callable[..., Path], tmp_path: Path) -> None:
    names = []
    for number, tied in enumerate((True, False)):
        file, _ = exported(splitting("llama", tie_word_embeddings=tied), tmp_path / str(number))
        names.append({t.name for t in gguf.GGUFReader(file).tensors})
        assert open_gguf(file).tied == tied
    assert names[1] - names[0] == {"output.weight"} and names[0] < names[1]


def test_rotary_scalings_come_back(splitting: Callable[..., Path], tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    linear = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    for number, parameters in enumerate((llama3, linear)):
        model = splitting("llama")
        config = json.loads((model / "config.json").read_text()) | {"rope_parameters": parameters}
        (model / "config.json").write_text(json.dumps(config))
        file, _ = exported(model, tmp_path / str(number))
        assert open_gguf(file).config["rope_parameters"] == parameters
        assert torch.equal(logits(file), logits(model))


def test_a_context_beyond_a_sliding_window_is_cut_and_said(splitting: Callable[..., Path], tmp_path: Path) -> None:
    model = splitting("mistral", sliding_window=24)
    file, result = exported(model, tmp_path / "out")
    assert open_gguf(file).config["max_position_embeddings"] == 24
    assert any("24 tokens, the model's sliding window" in note for note in result.notes)


def test_a_caches_scheme_that_is_left_out_is_said(splitting: Callable[..., Path], tmp_path: Path) -> None:
    model = splitting("llama")
    assert not any("cache" in note for note in exported(model, tmp_path / "without")[1].notes)
    _changed(model, "config.json", lambda c: c.update(specpress={"kv_cache": {"kind": "int8", "tensors": "x"}}))
    assert any("the cache's scheme is left out" in note for note in exported(model, tmp_path / "with")[1].notes)


def test_equal_models_give_equal_bytes(splitting: Callable[..., Path], tmp_path: Path) -> None:
    files = [exported(splitting("llama"), tmp_path / name)[0].read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]


def test_the_registry_writes_a_folder_or_nothing(splitting: Callable[..., Path], tmp_path: Path) -> None:
    model, out = splitting("llama"), tmp_path / "exports" / "gguf"
    assert run("gguf", model, out).name == "gguf"
    assert isinstance(open_checkpoint(out / "model.gguf"), GgufCheckpoint)
    with pytest.raises(UserError, match="not empty"):
        run("gguf", model, out)


def test_exporting_a_gguf_file_is_refused(splitting: Callable[..., Path], tmp_path: Path) -> None:
    file, _ = exported(splitting("llama"), tmp_path / "out")
    with pytest.raises(UserError, match="expected a model directory to export, found a GGUF file"):
        run("gguf", file, tmp_path / "again")


def test_compressing_a_gguf_file_is_refused(splitting: Callable[..., Path], tmp_path: Path) -> None:
    from compress.model.source import open_sources

    model = splitting("llama")
    assert open_sources(str(model), "none")[0].name == "llama"
    file, _ = exported(model, tmp_path / "out")
    with pytest.raises(UserError, match=r"model\.gguf: expected weights in full precision, found gguf"):
        open_sources(str(file), "none")


def _changed(model: Path, file: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((model / file).read_text())
    change(content)
    (model / file).write_text(json.dumps(content))


def _longrope(config: dict[str, Any]) -> None:
    config["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [], "long_factor": []}


REFUSED: dict[str, tuple[str, str, Callable[[dict[str, Any]], Any], str]] = {
    "architecture": ("llama", "config.json", lambda c: c.update(model_type="helium"), "expected one of llama"),
    "rope": ("llama", "config.json", _longrope, "found 'longrope' with"),
    "experts": ("qwen3_moe", "config.json", lambda c: c.update(norm_topk_prob=False), "renormalize True, as"),
    "split": (
        "llama",
        "tokenizer.json",
        lambda c: c["pre_tokenizer"].update(use_regex=False),
        "a way of splitting text that llama.cpp has a name for",
    ),
    "tokenizer": ("llama", "tokenizer.json", lambda c: c["model"].update(type="Unigram"), "expected a BPE tokenizer"),
    "vocabulary": ("llama", "config.json", lambda c: c.update(vocab_size=319), "expected ids below 319, found 319"),
}


@pytest.mark.parametrize("kind, file, change, sentence", REFUSED.values(), ids=REFUSED)
def test_what_the_format_cannot_hold_is_refused(
    kind: str,
    file: str,
    change: Callable[[dict[str, Any]], Any],
    sentence: str,
    splitting: Callable[..., Path],
    tmp_path: Path,
) -> None:
    model = splitting(kind)
    assert run("gguf", model, tmp_path / "first").bytes > 0
    _changed(model, file, change)
    with pytest.raises((UserError, RuntimeUserError)) as error:
        run("gguf", model, tmp_path / "second")
    assert sentence in str(error.value)
    assert not (tmp_path / "second").exists()
