"""Exports to ONNX, run by ONNX Runtime itself: the same logits, and exactly our weights in its operators.

Needs onnx, onnxscript and onnxruntime (the extra `onnx`).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.errors import UserError
from compress.export import FORMATS, run
from compress.export.onnx import check
from compress.export.onnx import graph as onnx_graph
from compress.export.onnx import model as onnx
from compress.model.source import default_pair
from runtime import formats, load
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.formats import nf4
from runtime.formats.packed import PackedWeight
from runtime.kernels import reference
from tests.compress.onnx_models import export, session, step
from tests.compress.packed_models import SCHEMES, write_packed
from tests.conftest import write_tiny

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

Tiny = Callable[..., Path]
# Whose products in the graph are ours: integers in, exact sums, one rounding scheme of inputs.
SAME_ARITHMETIC = ("int8", "int8-static", "int4", "int4-asymmetric", "int4-ordered", "int3", "int2-asymmetric")


# Tracing takes seconds; these differ little from Llama. Mixtral's experts are traced packed, below.
SLOW = ("qwen2", "qwen3", "mistral", "phi3", "gemma")
# What a configuration of two layers has to be told when it gets one.
_LAYER_TYPES = {"qwen2": {"layer_types": ["full_attention"]}, "qwen3": {"layer_types": ["full_attention"]}}


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 300, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(k, marks=pytest.mark.slow) for k in ("mixtral", "gpt2", *SLOW))]
)
def test_float_logits_with_any_batch_and_past(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    # One layer of those that come besides, because tracing takes seconds a layer.
    source = tiny(kind) if kind == "llama" else tiny(kind, num_hidden_layers=1, **_LAYER_TYPES.get(kind, {}))
    made = export(kind, source, tmp_path / "out")
    assert made.repacked == 0 and made.losses == ()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ran = session(tmp_path / "out")
    # The window of Mistral's 40 tokens is passed.
    for batch, past, count in ((1, 0, 7), (2, 0, 1), (2, 5, 3), (1, 50, 1), (3, 60, 4)):
        ids = tokens(batch, past + count, seed=past)
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
        states = step(ran, ids[:, :past])[2:] if past else None
        given = step(ran, ids[:, past:], states)
        expected = out.logits[:, past:].numpy()
        assert np.abs(given[0] - expected).max() < 1e-5 * np.abs(expected).max() + 1e-6
        np.testing.assert_allclose(given[1], out.hidden_states[-1][:, past:].numpy(), rtol=1e-4, atol=1e-4)
        assert given[2].shape[2] == past + count


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_models_run_as_on_our_kernels(scheme: str, tiny: Tiny, tmp_path: Path) -> None:
    source = write_packed(tiny("llama"), tmp_path / "model", scheme)
    made = export("llama", source, tmp_path / "out")
    assert made.repacked == 14 and made.losses == ()
    ids = tokens(1, 30)
    given = step(session(tmp_path / "out"), ids)[0][0]
    expected = _logits(_plain(source, tmp_path / "plain") if scheme == "nf4" else source, ids[0])
    errors = np.linalg.norm(given - expected, axis=1) / np.linalg.norm(expected, axis=1)
    if scheme in ("int4-rows", "ternary", "ternary-1.25"):
        # Ours rounds inputs per row here, and MatMulNBits per block.
        assert errors.max() < 0.05
    elif scheme in SAME_ARITHMETIC:
        # A float sum in another order may now and then move an input to the code beside it.
        assert np.median(errors) < 1e-5 and errors.max() < 0.02
    else:
        assert errors.max() < 1e-5


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_written_dequantises_to_exactly_our_weights(scheme: str, tiny: Tiny, tmp_path: Path) -> None:
    source = write_packed(tiny("llama"), tmp_path / "model", scheme)
    export("llama", source, tmp_path / "out")
    checkpoint, written = open_checkpoint(source), _written(tmp_path / "out")
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        packed = checkpoint.weight(name)
        assert isinstance(packed, PackedWeight)
        assert torch.equal(_dequantized(written, name, packed), formats.dequantize(packed))


def test_packed_experts_are_gathered_as_codes(tiny: Tiny, tmp_path: Path) -> None:
    experts = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    source = write_packed(tiny("mixtral", num_hidden_layers=1), tmp_path / "model", "int4", experts)
    made = export("mixtral", source, tmp_path / "out")
    assert made.repacked == 4 + 2 and any("experts" in note for note in made.notes)
    ids = tokens(1, 20)
    given = step(session(tmp_path / "out"), ids)[0][0]
    expected = _logits(source, ids[0])
    # Experts take floats here, and 8-bit inputs on our kernels.
    assert np.linalg.norm(given - expected) < 0.03 * np.linalg.norm(expected)
    codes = _written(tmp_path / "out")[0]["model.layers.0.mlp.experts.gate_up_proj.codes"]
    assert codes.dtype == torch.uint8 and codes.shape == (4, 2 * 192, 64 // 2)


def test_weights_above_the_limit_lie_in_a_file_of_their_own(tiny: Tiny, tmp_path: Path) -> None:
    import onnx as library

    one, two = tmp_path / "one", tmp_path / "two"
    export("llama", tiny("llama"), one)
    made = export("llama", tiny("llama"), two, one_file=100_000)
    assert not (one / "model.onnx.data").exists()
    assert made.bytes == (two / "model.onnx").stat().st_size + (two / "model.onnx.data").stat().st_size
    graph = library.load_model(two / "model.onnx", load_external_data=False).graph
    assert all(not t.raw_data or len(t.raw_data) <= 256 for t in graph.initializer)
    ids = tokens(2, 9)
    np.testing.assert_array_equal(step(session(one), ids)[0], step(session(two), ids)[0])


def test_float16_counts_what_it_rounds_and_refuses_what_it_cannot_hold(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("llama", num_hidden_layers=1)
    made = export("llama", source, tmp_path / "out", torch.float16)
    assert made.name == "onnx-fp16" and len(made.losses) == 8  # the table, which is the head, too
    assert made.worst is not None and made.worst.error < 5e-4
    ids = tokens(1, 12)
    given, expected = step(session(tmp_path / "out"), ids), _logits(source, ids[0])
    assert given[2].dtype == np.float16
    assert np.linalg.norm(given[0][0].astype(np.float32) - expected) < 5e-3 * np.linalg.norm(expected)

    large = write_tiny("llama", tmp_path / "large", num_hidden_layers=1)
    _scale_up(large)
    with pytest.raises(UserError, match=r"q_proj.weight: expected weights that float16 holds, found .*export to onnx"):
        export("llama", large, tmp_path / "refused", torch.float16)


def test_the_folder_is_whole(tiny: Tiny, tmp_path: Path) -> None:
    """Through the registry: config and tokenizer, a genai_config.json of the graph's names, nothing of this machine."""
    made = run("onnx", write_packed(tiny("llama", num_hidden_layers=1), tmp_path / "model", "int4"), tmp_path / "out")
    assert made.name == "onnx" and made.repacked == 7
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert (tmp_path / "out/tokenizer.json").is_file()
    about = json.loads((tmp_path / "out/genai_config.json").read_text())["model"]
    ran = session(tmp_path / "out")
    named = {**about["decoder"]["inputs"], **about["decoder"]["outputs"]}
    layers = range(about["decoder"]["num_hidden_layers"])
    expected = {name % i if "%d" in name else name for name in named.values() for i in layers}
    assert expected == {v.name for v in (*ran.get_inputs(), *ran.get_outputs())} - {"hidden_states"}
    assert (about["vocab_size"], about["context_length"], about["eos_token_id"]) == (320, 256, 0)
    written = (tmp_path / "out/model.onnx").read_bytes()
    assert b"stack_trace" not in written and str(Path(torch.__file__).parent).encode() not in written


def test_an_export_that_fails_leaves_nothing(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny("llama", tmp_path / "model")
    (source / "config.json").write_text(
        json.dumps(json.loads((source / "config.json").read_text()) | {"layer_types": ["linear_attention"] * 2})
    )
    with pytest.raises(UserError, match="expected layers whose state is keys and values, found linear_attention"):
        run("onnx", source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"onnx", "onnx-fp16"} <= set(FORMATS)
    assert onnx.refusal(frozenset({"int4"})) is None
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    assert "onnxscript is missing: pip install" in str(onnx.refusal(frozenset({"int4"})))
    with pytest.raises(UserError, match="expected the packages of the extra `onnx`"):
        onnx_graph.trace(Path("nowhere"))


def _logits(folder: Path, ids: torch.Tensor) -> np.ndarray:
    decoder = load(folder, kernels="reference").decoder
    cache = decoder.new_cache()
    rows = Rows.chains([(cache.open(len(ids)), 0, len(ids))])
    return decoder.forward(ids, rows, cache).logits.numpy()


def _plain(source: Path, out: Path) -> Path:
    """The model with its packed layers as float32."""
    import shutil

    from safetensors.torch import save_file

    checkpoint = open_checkpoint(source)
    tensors = {}
    for name in checkpoint.names():
        prefix = name.split("_proj.")[0] + "_proj" if "_proj." in name else ""
        if prefix:
            packed = checkpoint.weight(prefix)
            assert isinstance(packed, PackedWeight)
            tensors[f"{prefix}.weight"] = formats.dequantize(packed).contiguous()
        else:
            tensors[name] = checkpoint.tensor(name).clone()
    shutil.copytree(source, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    (out / "config.json").write_text(json.dumps(config))
    return out


def _scale_up(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] *= 1e7
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _written(folder: Path) -> Any:
    """Nodes by the layer in their names, and initialisers by name."""
    import onnx as library
    from onnx import numpy_helper

    graph = library.load_model(folder / "model.onnx").graph
    return {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in graph.initializer}, list(graph.node)


def _dequantized(written: Any, name: str, packed: PackedWeight) -> torch.Tensor:
    """(N, K) by the operators' definitions, written down anew."""
    tensors, nodes = written
    kinds = {n.op_type: n for n in nodes if n.name.startswith(f"{name}/")}
    codes = tensors[f"{name}.codes"]
    n, k = packed.shape
    if "MatMulInteger" in kinds or "QuantizeLinear" in kinds:
        whole = codes.float() - tensors[f"{name}.code_zeros"].float()
        return whole.T * tensors[f"{name}.scales"].unsqueeze(1)
    if "MatMulBnb4" in kinds:
        nibbles = torch.stack((codes >> 4, codes & 15), dim=1).flatten().long()
        blocks = nf4.LEVELS[nibbles].view(-1, 64) * tensors[f"{name}.absmax"].unsqueeze(1)
        return blocks.view(n, k)
    about = {a.name: a.i for a in kinds["MatMulNBits"].attribute}
    bits, block = about["bits"], about["block_size"]
    assert (about["N"], about["K"]) == (n, k)

    def unpack(octets: torch.Tensor) -> torch.Tensor:
        return torch.stack([octets >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=-1).flatten(1)

    count = -(-k // block)
    zeros: Any = torch.full((n, count), 1 << bits - 1)
    if f"{name}.zero_points" in tensors:
        zeros = unpack(tensors[f"{name}.zero_points"])[:, :count]
    values = unpack(codes.view(n, -1)).view(n, count, block).float() - zeros.unsqueeze(-1).float()
    whole = (values * tensors[f"{name}.scales"].unsqueeze(-1)).view(n, -1)[:, :k]
    if packed.perm is None:
        return whole
    restored = torch.empty_like(whole)
    restored[:, tensors[f"{name}.input_order"]] = whole
    return restored


def test_an_export_is_run_where_it_was_made(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_packed(tiny("llama"), tmp_path / "model", "int8")
    made = export("llama", source, tmp_path / "out")
    assert any("exact on every processor" in note for note in made.notes)
    said = check.sentence(source, tmp_path / "out", made.bytes)
    assert said.startswith("checked: run by ONNX Runtime on this machine (a processor with") and "alike" in said
    # Another model's file is noticed, one that cannot be run is told of, and so is a machine without ONNX Runtime.
    assert check.sentence(write_tiny("llama", tmp_path / "b", seed=1), tmp_path / "out", 0).startswith("wrong here: ")
    assert check.sentence(source, tmp_path / "out", check.MOST_BYTES + 1).startswith("not checked: it and the artifact")
    (tmp_path / "out" / "model.onnx").write_bytes(b"no graph")
    assert check.sentence(source, tmp_path / "out", 0).startswith("not checked: out/model.onnx")
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    assert check.sentence(source, tmp_path / "out", 0).startswith("not checked: ONNX Runtime")


def test_sums_that_saturate_are_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsigned inputs times signed codes in pairs of 16 bits, as x86 adds them without VNNI: on real weights."""
    source = write_packed(default_pair()[1], tmp_path / "model", "int8")
    ours = check.logits(load(source).decoder)
    exact = check.logits(load(source, kernels="reference").decoder)
    assert check.judged(ours, exact).startswith("checked: ")
    monkeypatch.setattr(reference, "integer_product", _saturating)
    found = check.judged(ours, check.logits(load(source, kernels="reference").decoder))
    assert found.startswith("checked in part: ") and "saturate" in found


def _saturating(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    inputs, whole = x.int() + 128, codes.int()
    pairs = inputs[:, 0::2, None] * whole[0::2] + inputs[:, 1::2, None] * whole[1::2]
    return pairs.clamp(-(1 << 15), (1 << 15) - 1).sum(dim=1, dtype=torch.int32) - 128 * whole.sum(0, dtype=torch.int32)
