"""Exports: what a form can hold arrives exactly, what it cannot is measured or refused, and nothing is half written."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from compress import Artifact, Recipe, export
from compress.artifact import manifest
from compress.artifact.files import write_atomic
from compress.errors import UserError
from compress.export import Exported, Loss, layers
from compress.export.__main__ import app
from compress.pipeline import compress
from compress.quantize.rtn import relative_error
from compress.recipe.exports import EXPORTS
from runtime import formats, load
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.formats import fp8, int4, int8, nf4, ternary, three_of_four
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import KINDS

Tiny = Callable[..., Path]
Pack = Callable[[str, Tensor], PackedWeight]
INTEGERS = ("gptq", "awq", "compressed-tensors")


def order(weight: Tensor, bits: int = 4) -> PackedWeight:
    perm = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[0]))
    packed = int4.pack(weight[:, perm], 32, bits=bits, symmetric=False)
    return replace(packed, perm=perm)


# How each kind of model is packed, from a layer's name and weight.
PACKS: dict[str, Pack] = {
    "int4": lambda name, w: int4.pack(w, 32),
    "int4 rows": lambda name, w: int4.pack(w, 0),
    "int4 zero points": lambda name, w: int4.pack(w, 32, symmetric=False),
    "int4 order": lambda name, w: order(w),
    "int6": lambda name, w: int4.pack(w, 32, bits=6),
    "int5": lambda name, w: int4.pack(w, 64, bits=5, symmetric=False),
    "int3": lambda name, w: int4.pack(w, 32, bits=3, symmetric=False),
    "int2": lambda name, w: int4.pack(w, 64, bits=2),
    "int8": lambda name, w: int8.pack(w),
    "int8 static": lambda name, w: int8.pack(w, input_scale=0.02),
    "two sizes": lambda name, w: int4.pack(w, 64 if "down" in name else 32),
    "two widths": lambda name, w: int8.pack(w) if "down" in name else int4.pack(w, 32),
    "nf4": lambda name, w: nf4.pack(w),
    "ternary": lambda name, w: ternary.pack(w),
    "ternary-1.25": lambda name, w: three_of_four.pack(w),
    "fp8": lambda name, w: fp8.pack(w),
}


def write_packed(source: Path, out: Path, pack: Pack) -> Path:
    """The model with its linear layers packed and biases kept, as a run writes it."""
    shutil.copytree(source, out)
    tensors, schemes, reordered = {}, {}, []
    stored = load_file(source / "model.safetensors")
    for name, tensor in stored.items():
        prefix = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            tensors.setdefault(name, tensor)
            continue
        packed = pack(prefix, tensor)
        tensors |= formats.to_tensors(packed, prefix, torch.float32)
        schemes[prefix] = packed.scheme
        reordered += [prefix] if packed.perm is not None else []
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = formats.hf_config(schemes, ["lm_head"], reordered=reordered)
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def packed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """packed("int4", "qwen2") is a packed tiny model; qwen2's layers have biases."""
    made: dict[tuple[str, str], Path] = {}

    def get(kind: str, family: str = "llama") -> Path:
        if (kind, family) not in made:
            out = tmp_path_factory.mktemp("packed") / "model"
            made[kind, family] = write_packed(tiny(family), out, PACKS[kind])
        return made[kind, family]

    return get


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every linear layer's weight as a reader has it."""
    found = {}
    for name in sorted({n.rpartition("_proj.")[0] for n in checkpoint.names() if "_proj." in n}):
        weight = checkpoint.weight(f"{name}_proj")
        found[f"{name}_proj"] = formats.dequantize(weight) if isinstance(weight, PackedWeight) else weight.float()
    return found


def made(name: str, model: Path, out: Path) -> tuple[Exported, Checkpoint]:
    """An export; its losses are checked against the weights, its other tensors against the model's."""
    exported = export.run(name, model, out / name)
    before, after = open_checkpoint(model), open_checkpoint(out / name)
    old, new = weights(before), weights(after)
    assert old.keys() == new.keys() and len(old) == 14
    lost = {loss.layer: loss.error for loss in exported.losses}
    for layer, weight in old.items():
        assert torch.equal(weight, new[layer]) == (layer not in lost), layer
        assert relative_error(weight, new[layer]) == pytest.approx(lost.get(layer, 0.0))
    assert exported.repacked == 14 - len(lost)
    for tensor in before.names():
        if "_proj." not in tensor or tensor.endswith(".bias"):
            assert torch.equal(before.tensor(tensor), after.tensor(tensor)), tensor
    assert exported.bytes == after.bytes_on_disk()
    assert json.loads((out / name / "export.json").read_text()) == exported.to_dict()
    assert (out / name / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    return exported, after


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("int4", INTEGERS),
        ("int4 rows", INTEGERS),
        ("int4 zero points", INTEGERS),
        ("int4 order", ("gptq", "compressed-tensors")),
        ("int6", ("gptq", "compressed-tensors")),
        ("int5", ("gptq", "compressed-tensors")),
        ("int3", INTEGERS),
        ("int2", INTEGERS),
        ("int8", ("gptq", "compressed-tensors", "bitsandbytes")),
        ("int8 static", ("gptq", "compressed-tensors", "bitsandbytes")),
        ("two sizes", INTEGERS),
        ("two widths", ("gptq", "compressed-tensors")),
        ("nf4", ("bitsandbytes",)),
        ("ternary", ("bitnet",)),
        ("ternary-1.25", INTEGERS),
    ],
)
def test_what_a_form_can_hold_is_repacked(
    packed: Callable[..., Path], tmp_path: Path, kind: str, names: tuple[str, ...]
) -> None:
    family = "qwen2" if kind in ("int4 zero points", "int8", "nf4", "ternary") else "llama"
    for name in names:
        exported, after = made(name, packed(kind, family), tmp_path)
        assert exported.repacked == 14 and exported.worst is None, name
        assert (after.quantization or {})["quant_method"] == name
        assert (family == "qwen2") == any(n.endswith("_proj.bias") for n in after.names())


@pytest.mark.parametrize(
    ("kind", "name", "least", "most"),
    [
        ("int8", "awq", 0.03, 0.2),
        ("int4 order", "awq", 0.005, 0.2),
        ("int6", "awq", 0.03, 0.2),
        ("int6", "bitsandbytes", 0.003, 0.03),
        ("int4", "bitsandbytes", 0.03, 0.2),
        ("two widths", "bitsandbytes", 0.03, 0.2),
        # The scale's last bits: float32 here, 16 bits there.
        ("ternary", "gptq", 1e-6, 1e-3),
        ("ternary", "awq", 1e-6, 1e-3),
        ("ternary", "compressed-tensors", 1e-6, 1e-2),
    ],
)
def test_what_a_form_cannot_hold_is_rounded_and_measured(
    packed: Callable[..., Path], tmp_path: Path, kind: str, name: str, least: float, most: float
) -> None:
    exported, _ = made(name, packed(kind), tmp_path)
    assert exported.losses and exported.worst is not None
    assert least < exported.worst.error < most
    assert any("rounded again" in line for line in exported.sentences())


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("nf4", "gptq", "found nf4.*export to bitsandbytes"),
        ("nf4", "awq", "found nf4"),
        ("nf4", "compressed-tensors", "found nf4"),
        ("ternary", "bitsandbytes", "export to bitnet"),
        ("ternary-1.25", "bitsandbytes", "no ternary format.*export to gguf"),
        ("ternary-1.25", "bitnet", "has one scale a layer, found ternary-1.25"),
        ("int4", "bitnet", "found int4, which rounding to three values would ruin"),
    ],
)
def test_refusals_are_known_before_the_work(
    packed: Callable[..., Path], tmp_path: Path, kind: str, name: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        export.run(name, packed(kind), tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=message):
        export.check_kinds([name], {kind})
    with pytest.raises(UserError, match="expected packed weights, found plain ones"):
        export.check_kinds([name], set())


@pytest.mark.parametrize("name", EXPORTS)
def test_kinds_that_exporters_do_not_know_stay_in_their_own_library(
    packed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    toy = {**KINDS, "int9": replace(KINDS["int4"], module="toy", library="toy")}
    monkeypatch.setattr(export, "KINDS", toy)
    with pytest.raises(UserError, match=f"export {name}: expected weights other than int9, which toy alone holds"):
        export.check_kinds([name], {"int9", "int8"})
    if name == "compressed-tensors":
        assert made(name, packed("fp8"), tmp_path)[0].losses == ()
        return
    with pytest.raises(UserError, match="expected weights other than fp8, which compressed-tensors alone holds"):
        export.run(name, packed("fp8"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_plain_models_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected packed weights, found plain ones"):
        export.run("gptq", tiny("llama"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_odd_shapes_stay_plain_and_are_named_to_loaders(tiny: Tiny, tmp_path: Path) -> None:
    model = write_packed(tiny("llama", intermediate_size=92), tmp_path / "4", lambda n, w: int4.pack(w, 4))
    with pytest.raises(UserError, match="in groups of 8 and more: export compressed-tensors"):
        export.run("gptq", model, tmp_path / "x")
    model = write_packed(tiny("llama"), tmp_path / "12", lambda n, w: int4.pack(w, 12 if "down" in n else 32))
    for name in ("gptq", "awq"):
        with pytest.raises(UserError, match="12, 32 inputs have only parts of 4 in common: export compressed-tensors"):
            export.run(name, model, tmp_path / "x")
    model = write_packed(
        tiny("llama", intermediate_size=92), tmp_path / "model", lambda n, w: int4.pack(w, 4 if "down" in n else 32)
    )
    exported, after = made("gptq", model, tmp_path)
    quantization = after.quantization or {}
    plain = {f"model.layers.{i}.mlp.{part}_proj" for i in (0, 1) for part in ("gate", "up", "down")}
    assert {loss.layer for loss in exported.losses} <= plain
    assert all(f"{layer}.weight" in after.names() for layer in plain)
    listed = {key.removeprefix("-:^").removesuffix("$").replace("\\", "") for key in quantization["dynamic"]}
    assert listed == plain and not plain & set(quantization["modules_in_block_to_quantize"][0])
    assert any("6 layers do not fill words" in note for note in exported.notes)
    export.run("compressed-tensors", tmp_path / "gptq", tmp_path / "back")
    assert {"lm_head", *plain} <= set((open_checkpoint(tmp_path / "back").quantization or {})["ignore"])
    _, after = made("awq", model, tmp_path)
    assert plain <= {"lm_head", *(after.quantization or {})["modules_to_not_convert"]}


def test_what_gptq_says(packed: Callable[..., Path], tmp_path: Path) -> None:
    said = {}
    for kind in ("int6", "int4", "int4 rows", "int4 zero points", "int4 order", "two sizes", "two widths"):
        exported, after = made("gptq", packed(kind), tmp_path / kind)
        said[kind] = (after.quantization or {}) | {"notes": " ".join(exported.notes)}
    assert (said["int4"]["checkpoint_format"], said["int4"]["sym"], said["int4"]["group_size"]) == ("gptq", True, 32)
    assert said["int4 rows"]["group_size"] == -1
    assert said["int6"]["bits"] == 8 and "5 and 6 bits are stored in 8" in said["int6"]["notes"]
    assert said["int4 zero points"]["sym"] is False
    assert said["int4 order"]["desc_act"] is True and said["int4"]["desc_act"] is False
    assert said["two sizes"]["group_size"] == 32 and "cut into groups of 32" in said["two sizes"]["notes"]
    assert {value["bits"] for value in said["two widths"]["dynamic"].values()} == {8}
    low = [said[kind]["checkpoint_format"] for kind in ("int4 zero points", "int4 order")]
    assert set(low) <= {"gptq", "gptq_v2"}


def test_zero_points_of_zero_are_written_as_v2(tiny: Tiny, tmp_path: Path) -> None:
    model = write_packed(
        tiny("llama"), tmp_path / "model", lambda n, w: int4.pack(w + (0.5 if "up" in n else 0), 32, symmetric=False)
    )
    exported, after = made("gptq", model, tmp_path)
    assert (after.quantization or {})["checkpoint_format"] == "gptq_v2"
    assert any("written as gptq_v2" in note for note in exported.notes)


def test_a_form_that_a_model_has_is_copied(packed: Callable[..., Path], tmp_path: Path) -> None:
    for kind, name in (("int4", "compressed-tensors"), ("nf4", "bitsandbytes"), ("ternary", "bitnet")):
        made(name, packed(kind), tmp_path)
        before, after = (p / "model.safetensors" for p in (packed(kind), tmp_path / name))
        assert before.read_bytes() == after.read_bytes()
    # And there and back: the codes of before.
    made("gptq", packed("int4 order"), tmp_path)
    back, after_back = made("compressed-tensors", tmp_path / "gptq", tmp_path / "back")
    assert back.repacked == 14
    assert weights(after_back).keys() == weights(open_checkpoint(packed("int4 order"))).keys()
    for layer, weight in weights(open_checkpoint(packed("int4 order"))).items():
        assert torch.equal(weight, weights(after_back)[layer])


def test_sharded_models(packed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.artifact import safetensors

    monkeypatch.setattr(safetensors.join, "__defaults__", (60_000,))
    exported, after = made("gptq", packed("int4"), tmp_path)
    assert len(after.shards.files) > 2 and exported.repacked == 14
    again, twice = made("gptq", tmp_path / "gptq", tmp_path / "again")
    assert len(twice.shards.files) == len(after.shards.files) and again.repacked == 14


def test_offsets_that_are_no_zero_points() -> None:
    good = int4.pack(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), 32, symmetric=False)
    assert layers.with_whole_zeros(good) is good
    assert good.offset is not None
    odd = replace(good, offset=good.offset + 0.37 * good.scale)
    whole = layers.with_whole_zeros(odd)
    assert formats.codes.whole_zeros(whole) is not None
    step = good.scale.repeat_interleave(32, dim=1)
    error = (formats.dequantize(whole) - formats.dequantize(odd)).abs()
    clipped = (whole.codes == -8) | (whole.codes == 7)
    assert bool((error <= 0.5001 * step)[~clipped].all()) and float(error.max()) > 0


def test_a_packed_head(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "head.yaml").write_text("stages: [{quantize: {scheme: int8-dynamic, head: int8}}]\n")
    folder = compress(tiny("qwen2"), tmp_path / "head.yaml", tmp_path / "run", report=nothing)
    found = {name: export.run(name, folder.model, tmp_path / name) for name in ("gptq", "awq", "bitsandbytes")}
    assert found["gptq"].repacked == found["bitsandbytes"].repacked == 15
    said = open_checkpoint(tmp_path / "gptq").quantization or {}
    assert said["lm_head"] is True and any("The head is packed too" in note for note in found["gptq"].notes)
    # AWQ's loaders leave the head as it is, so it is stored so: int8's values in float32, exactly.
    head = open_checkpoint(tmp_path / "awq").weight("lm_head")
    whole = open_checkpoint(folder.model).weight("lm_head")
    assert isinstance(head, Tensor) and isinstance(whole, PackedWeight)
    assert torch.equal(head, formats.dequantize(whole)) and found["awq"].repacked == 1


def nothing(*_: Any) -> dict[str, Any]:
    """In place of a report."""
    return {}


@pytest.mark.parametrize(("kind", "name"), [("int4", "bitsandbytes"), ("int8", "bitsandbytes")])
def test_transformers_runs_exports(packed: Callable[..., Path], tmp_path: Path, kind: str, name: str) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    export.run(name, packed(kind), tmp_path / name)
    theirs, said = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32, output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    text = torch.randint(1, 320, (48,), generator=torch.Generator().manual_seed(3))
    decoder: Any = load(tmp_path / name, threads=1).decoder
    cache = decoder.new_cache()
    ours = decoder.forward(text, Rows.chains([(cache.open(64), 0, 48)]), cache).logits
    with torch.no_grad():
        logits = theirs(text.view(1, -1)).logits[0].float()
    # A random model, inputs of 8 bits here and of 16 there: what kernels do, not what the file says.
    assert float((ours - logits).norm() / logits.norm()) < 0.1


# The command, the run folder and the report.


@pytest.fixture(scope="module")
def artifact(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of int4, with a report that measures nothing."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "code.txt"
    text.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))
    options: dict[str, Any] = {"seq_len": 32, "samples": 2, "eval_tokens": 0, "speed": False, "export": ("gptq",)}
    recipe = Recipe.load("int4-rtn").model_copy(update={"export": ("awq", "gptq")})
    return compress(tiny("qwen3"), recipe, folder / "int4", calib=str(text), **options).path


def command(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_run_exports_and_reports(artifact: Path) -> None:
    Artifact(artifact).verify()
    report, listed = Artifact(artifact).report, manifest.read(artifact)
    assert [entry["name"] for entry in report["exports"]] == ["awq", "gptq"]
    assert [entry | {"measured": None} for entry in listed["exports"]] == report["exports"]
    assert "the models were not loaded" in report["not_measured"]["exports.0.measured"]
    assert all(entry["repacked"] == 14 and entry["worst"] is None for entry in report["exports"])
    assert "exports/gptq/model.safetensors" in listed["files"]
    assert "## Exports" in (artifact / "report.md").read_text()
    assert "<h2>Exports" in (artifact / "report.html").read_text()
    assert Recipe.load(artifact / "recipe.yaml").export == ("awq", "gptq")


def test_the_command_adds_to_a_run(artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "int4"
    shutil.copytree(artifact, folder)
    result = command(folder, "--to", "bitsandbytes, compressed-tensors")
    assert result.exit_code == 0, result.output
    assert "14 layers rounded again: relative error 0." in result.stdout
    Artifact(folder).verify()
    report = Artifact(folder).report
    assert [entry["name"] for entry in report["exports"]] == ["awq", "bitsandbytes", "compressed-tensors", "gptq"]
    lost = {entry["name"]: entry["worst"] for entry in report["exports"]}
    assert lost["bitsandbytes"]["error"] > 0.03 and lost["compressed-tensors"] is None
    assert lost["bitsandbytes"]["layer"].replace("_", "\\_") in (folder / "report.md").read_text()
    # A second time only with --force.
    assert "is not empty: replace it with --force" in command(folder, "--to", "gptq").stderr
    assert command(folder, "--to", "gptq", "--force").exit_code == 0
    Artifact(folder).verify()
    # A model directory, elsewhere.
    result = command(folder / "model", "--to", "gptq", "--out", tmp_path / "out")
    assert result.exit_code == 0 and (tmp_path / "out" / "gptq" / "config.json").is_file()


def test_recipes_know_every_form() -> None:
    assert tuple(export.FORMATS) == EXPORTS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "gguff"], "export 'gguff' is unknown: expected one of gptq, awq"),
        (["--to", ""], "expected at least one of gptq"),
        (["--to", "bitnet"], "export bitnet: bitnet holds ternary weights, found int4"),
        (["--to", "gptq"], "gptq is not empty"),
    ],
)
def test_mistakes_are_one_sentence(artifact: Path, words: list[str], message: str) -> None:
    result = command(artifact, *words)
    assert result.exit_code == 2 and message in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in result.output
    Artifact(artifact).verify()


def test_places(artifact: Path, packed: Callable[..., Path], tmp_path: Path) -> None:
    assert "is in no run folder" in command(packed("int4"), "--to", "gptq").stderr
    assert "no such directory" in command(tmp_path / "nothing", "--to", "gptq").stderr
    (tmp_path / "mine" / "gptq").mkdir(parents=True)
    (tmp_path / "mine" / "gptq" / "thesis.txt").write_text("all of it")
    result = command(packed("int4"), "--to", "gptq", "--out", tmp_path / "mine", "--force")
    assert result.exit_code == 2 and "was not written by an export" in result.stderr
    assert (tmp_path / "mine" / "gptq" / "thesis.txt").read_text() == "all of it"


def test_a_failure_leaves_nothing(packed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr("compress.artifact.safetensors.join", full)
    result = command(packed("int4"), "--to", "gptq", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "No space left" in result.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_recipes_name_exports(tmp_path: Path) -> None:
    write_atomic(tmp_path / "r.yaml", b"extends: int4-rtn\nexport: [gptq, awq]\n")
    assert Recipe.load(tmp_path / "r.yaml").export == ("gptq", "awq")
    write_atomic(tmp_path / "r.yaml", b"extends: int4-rtn\nexport: [gtpq]\n")
    with pytest.raises(UserError, match="export 'gtpq' is unknown"):
        Recipe.load(tmp_path / "r.yaml")
    assert "export" not in Recipe.load("int4-rtn").to_dict()


def test_a_recipe_that_cannot_be_exported_stops_before_the_work(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"export gptq: .*found nf4"):
        compress(tiny("llama"), "nf4", tmp_path / "out", export=("gptq",))
    assert not list(tmp_path.iterdir())


def test_help_is_quick_and_lists_what_there_is() -> None:
    result = command("--help")
    assert result.exit_code == 0 and "--to" in result.stdout


def test_the_worst_layer() -> None:
    exported = Exported("gptq", 10, 1, (Loss("a", 0.1), Loss("b", 0.3)), ("Note.",))
    assert exported.worst == Loss("b", 0.3)
    assert exported.sentences()[1] == "2 layers rounded again: relative error 0.2 on average, 0.3 at worst (b)."


def test_layers_are_found_by_their_scales(packed: Callable[..., Path]) -> None:
    for kind in PACKS:
        found = layers.survey(packed(kind))
        assert len(found.packed) == 14 and found.skipped == ("lm_head",)
        assert all(facts.reordered == (kind == "int4 order") for facts in found.packed)
