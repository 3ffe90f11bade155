"""From a model to an artifact: what is quantised, what stays, and what is left behind when something goes wrong."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.artifact import Artifact, manifest
from compress.context import RunContext
from compress.errors import USER_ERRORS, UserError
from compress.export import FORMATS
from compress.export import run as export
from compress.pipeline import compress
from compress.progress import Progress, silent
from compress.recipe import Recipe
from compress.records import RunFacts
from runtime import load
from runtime.bench.digest import digests
from runtime.checkpoints.open import open_checkpoint
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight
from runtime.kernels.dispatch import choose

Tiny = Callable[..., Path]
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "qwen3_moe", "gpt2")


class FakeReport:
    """Keeps the facts; the real report has tests of its own."""

    def __init__(self, failure: BaseException | None = None):
        self.failure = failure
        self.facts: RunFacts

    def __call__(self, facts: RunFacts, context: RunContext) -> dict[str, Any]:
        self.facts = facts
        if self.failure is not None:
            raise self.failure
        return {}


class StopAt:
    """Progress that raises when a stage reaches a number."""

    def __init__(self, stage: str, done: int, failure: BaseException):
        self.at, self.failure = (stage, done), failure

    def __call__(self, stage: str, done: int, total: int) -> None:
        if (stage, done) == self.at:
            raise self.failure


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "code.txt"
    path.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))
    return path


@pytest.fixture
def go(text: Path, tmp_path: Path) -> Callable[..., tuple[Artifact, RunFacts]]:
    """`go(model, recipe, **options)` runs with a fake report and small windows."""

    def run_it(
        model: Path,
        recipe: str | Path = "nf4",
        out: Path | None = None,
        progress: Progress = silent,
        failure: BaseException | None = None,
        **options: Any,
    ) -> tuple[Artifact, RunFacts]:
        report = FakeReport(failure)
        small = {"calib": str(text), "seq_len": 32, "eval_tokens": 64, "samples": 2} | options
        artifact = compress(model, recipe, out or tmp_path / "out", report=report, progress=progress, **small)
        return artifact, report.facts

    return run_it


def recipe(folder: Path, **quantize: Any) -> Path:
    path = folder / "own.yaml"
    path.write_text(json.dumps({"stages": [{"quantize": quantize}]}))
    return path


def damaged(model: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a model with other tensors."""
    copy = folder / "damaged"
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def refusal(folder: Path, call: Callable[[], Any]) -> str:
    """The sentence of a user's mistake, which must leave nothing in `folder` that was not there."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(USER_ERRORS) as caught:
        call()
    assert sorted(folder.rglob("*")) == before
    return str(caught.value)


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


def test_resume_goes_on_after_the_committed_blocks(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    model = tiny("mistral")
    go(model, out=tmp_path / "straight")
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="power"):
        go(model, progress=StopAt("quantize", 3, RuntimeError("power cut")))
    partial = tmp_path / "out.partial"
    parts = sorted(partial.glob("part-*.safetensors"))
    assert len(parts) == 3 and not out.exists()
    times = [path.stat().st_mtime_ns for path in parts]
    with pytest.raises(UserError, match=r"out\.partial holds a run that was cut short.*--resume.*--force"):
        go(model)
    with pytest.raises(UserError, match="seed was 0 and is 9"):
        go(model, resume=True, seed=9)
    with pytest.raises(UserError, match=r"recipe.*scheme was 'nf4' and is 'int4'"):
        go(model, "int4-rtn", resume=True)
    # A second cut, now in the report: the journalled blocks are not made again.
    with pytest.raises(RuntimeError):
        go(model, resume=True, failure=RuntimeError("again"))
    assert [path.stat().st_mtime_ns for path in parts] == times
    artifact, facts = go(model, resume=True)
    assert not partial.exists()
    assert len(facts.layers) == 14
    assert (out / manifest.NAME).read_bytes() == (tmp_path / "straight" / manifest.NAME).read_bytes()
    left = ["SERVE.md", "manifest.json", "model", "recipe.yaml", "serve"]
    assert sorted(path.name for path in artifact.path.iterdir()) == left


STOPS = [
    (KeyboardInterrupt("now"), KeyboardInterrupt, "now"),
    (OSError(errno.ENOSPC, "No space left on device"), UserError, "no space left on the device"),
    (PermissionError(errno.EACCES, "Permission denied", "x"), UserError, "no permission"),
]


@pytest.mark.parametrize(
    ("failure", "raised", "sentence"), [*STOPS, (UserError("the text is too short"), UserError, "too short")]
)
def test_nothing_is_left_of_no_work(
    tiny: Tiny, go: Any, tmp_path: Path, failure: BaseException, raised: type[BaseException], sentence: str
) -> None:
    with pytest.raises(raised, match=sentence):
        go(tiny("llama"), out=tmp_path / "deep" / "run", progress=StopAt("quantize", 0, failure))
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_leaves_nothing_of_rounding(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    failure = UserError("the text is too short")
    for trouble in ({"progress": StopAt("quantize", 4, failure)}, {"failure": failure}):
        with pytest.raises(UserError, match="too short"):
            go(tiny("llama"), out=tmp_path / "deep" / "run", **trouble)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("failure", "raised", "sentence"), STOPS)
def test_what_is_done_is_kept_and_said_so(
    tiny: Tiny, go: Any, tmp_path: Path, failure: BaseException, raised: type[BaseException], sentence: str
) -> None:
    go(tiny("llama"), out=tmp_path / "straight")
    for number, trouble in enumerate(({"progress": StopAt("quantize", 3, failure)}, {"failure": failure})):
        out = tmp_path / f"run{number}"
        with pytest.raises(raised, match=sentence) as caught:
            go(tiny("llama"), out=out, **trouble)
        said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert f"run{number}.partial is kept for --resume" in said
        go(tiny("llama"), out=out, resume=True)
        assert (out / manifest.NAME).read_bytes() == (tmp_path / "straight" / manifest.NAME).read_bytes()


def test_ctrl_c_keeps_what_was_resumed(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        go(tiny("llama"), progress=StopAt("quantize", 2, RuntimeError()))
    with pytest.raises(KeyboardInterrupt):
        go(tiny("llama"), progress=StopAt("quantize", 3, KeyboardInterrupt()), resume=True)
    artifact, _ = go(tiny("llama"), resume=True)
    artifact.verify()


def test_output_that_is_not_empty(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    go(tiny("llama"))
    before = (out / manifest.NAME).read_bytes()
    assert "--force" in refusal(tmp_path, lambda: go(tiny("llama"), "int4-rtn"))
    # A run that fails leaves the old one as it was.
    with pytest.raises(KeyboardInterrupt):
        go(tiny("llama"), "int4-rtn", force=True, failure=KeyboardInterrupt())
    assert (out / manifest.NAME).read_bytes() == before
    go(tiny("llama"), "int4-rtn", force=True)
    assert manifest.read(out)["recipe"] == "int4-rtn"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_force_deletes_only_runs(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    go(tiny("llama"))  # an empty folder is fine
    shutil.rmtree(out)
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    assert "not written by a run" in refusal(tmp_path, lambda: go(tiny("llama"), force=True))
    shutil.rmtree(out)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "notes").write_text("mine")
    assert "in the way" in refusal(tmp_path, lambda: go(tiny("llama"), force=True))
    shutil.rmtree(tmp_path / "out.partial")
    out.write_text("a file")
    assert "found a file" in refusal(tmp_path, lambda: go(tiny("llama"), force=True))


def test_resume_needs_something_to_resume(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    assert "found none" in refusal(tmp_path, lambda: go(tiny("llama"), resume=True))


def test_force_starts_a_cut_run_again(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        go(tiny("llama"), progress=StopAt("quantize", 2, RuntimeError()))
    artifact, _ = go(tiny("llama"), "int4-rtn", force=True)
    assert artifact.manifest["recipe"] == "int4-rtn"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_bad_weights_are_named(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors[name][3, 5] = value

        return change

    for value in (float("nan"), float("inf")):
        model = damaged(tiny("llama"), tmp_path, spoil(value))
        assert f"tensor {name}" in refusal(tmp_path, lambda model=model: go(model))  # type: ignore[misc]
        shutil.rmtree(model)
    model = damaged(tiny("llama"), tmp_path, lambda tensors: tensors.__delitem__(name))
    assert f"tensor {name} is missing" in refusal(tmp_path, lambda: go(model))
    shutil.rmtree(model)
    model = damaged(tiny("llama"), tmp_path, lambda tensors: tensors.update({name: tensors[name][:5].clone()}))
    message = refusal(tmp_path, lambda: go(model))
    assert f"tensor {name}: expected shape [192, 64] as config.json says, found [5, 64]" in message
    shutil.rmtree(model)
    model = damaged(tiny("llama"), tmp_path, lambda tensors: None)
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "truncated" in refusal(tmp_path, lambda: go(model))


def test_models_that_cannot_be_taken(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny("llama"), model)
    config = json.loads((model / "config.json").read_text())
    for key, value in (("model_type", "nosuchmodel"), ("model_type", "vit"), ("hidden_size", "wide")):
        (model / "config.json").write_text(json.dumps(config | {key: value}))
        assert "model/config.json" in refusal(tmp_path, lambda: go(model))
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pickle" in refusal(tmp_path, lambda: go(model))
    index = {"weight_map": {"model.embed_tokens.weight": "../../evil.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "leaves the directory" in refusal(tmp_path, lambda: go(model))
    done, _ = go(tiny("llama"), out=tmp_path / "done")
    assert "full precision" in refusal(tmp_path, lambda: go(done.model))
    assert "no such directory" in refusal(tmp_path, lambda: go(tmp_path / "nowhere"))


def test_the_vocabularies_must_agree(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(tiny("mistral"), draft)
    content = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = (next(token for token, number in vocabulary.items() if number == n) for n in (40, 41))
    vocabulary[first], vocabulary[second] = 41, 40
    (draft / "tokenizer.json").write_text(json.dumps(content))
    message = refusal(tmp_path, lambda: go(tiny("llama"), draft=str(draft)))
    assert f"token 40 is {first!r} in the target and {second!r} in the draft" in message


def test_text_that_is_too_short_stops_before_the_work(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    never = StopAt("quantize", 0, AssertionError("the work began"))
    message = refusal(tmp_path, lambda: go(tiny("llama"), calib=str(tmp_path / "short.txt"), progress=never))
    assert "short.txt is too short" in message


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"baselines": "most"}, "--baselines: expected none, eager, all, found 'most'"),
        ({"samples": 0}, "--samples: expected a whole number from 1 to 100000, found 0"),
        ({"seq_len": 4}, "--seq-len"),
        ({"eval_tokens": -1}, "--eval-tokens: expected a whole number from 0"),
        ({"memory_budget": 0}, "--memory-budget"),
        ({"draft_length": 65}, "--draft-length: expected a whole number from 1 to 64, found 65"),
        ({"threads": 0}, "--threads"),
        ({"seed": -1}, "--seed"),
        ({"new_tokens": 0}, "--new-tokens"),
        pytest.param(
            {"device": "cuda"},
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA"),
        ),
        ({"device": "tpu"}, "--device: expected cpu, cuda, cuda:N or auto, found 'tpu'"),
    ],
)
def test_numbers_out_of_range(tiny: Tiny, go: Any, tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(tmp_path, lambda: go(tiny("llama"), **options))


def test_the_callers_threads_are_as_they_were(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    go(tiny("llama"), threads=before + 1)
    assert torch.get_num_threads() == before
    with pytest.raises(UserError, match="--threads"):
        go(tiny("llama"), out=tmp_path / "none", threads=0)
    assert torch.get_num_threads() == before


def test_the_python_api(tiny: Tiny, text: Path, tmp_path: Path) -> None:
    from compress import compress

    artifact = compress(
        tiny("llama"), Recipe.load("nf4"), tmp_path / "api", calib=str(text), seq_len=32, eval_tokens=64, samples=2,
        new_tokens=4, speed=False,
    )  # fmt: skip
    assert artifact.model == tmp_path / "api" / "model" and artifact.draft is None
    assert artifact.report["recipe"] == "nf4"
    assert artifact.report["speed"]["speculative"] is None
    artifact.verify()
    with pytest.raises(UserError, match="option 'sample' is unknown"):
        compress(tiny("llama"), "nf4", tmp_path / "x", sample=3)
