"""The GPU's benchmarks at toy sizes: their rows, what they leave out, and that interpreted times are called so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from runtime.bench.__main__ import app
from runtime.bench.decode import computed_bytes
from runtime.bench.device_models import random_model
from runtime.bench.kernels import winners
from runtime.bench.measure import find, read_bytes
from runtime.bench.output import show_choices
from runtime.bench.random_models import DEVICE_SCHEMES, random_weight
from runtime.bench.shapes import SHAPES, Shape
from runtime.contract import Rows
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight
from runtime.kernels.library_choice import IMPLEMENTATIONS, Choice, parse, shown

PAIR = Path(__file__).parents[3] / "examples" / "pair"
TOY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
TOY |= {"num_key_value_heads": 1, "vocab_size": 512}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A shape of one narrow block, and copies of a megabyte: the figures do not matter here."""
    toy = Shape("pair", dict(SHAPES["pair"].config) | TOY)
    monkeypatch.setattr("runtime.bench.random_models.SHAPES", {**SHAPES, "pair": toy})
    for name in ("device_models", "decode", "generate", "layers"):
        monkeypatch.setattr(f"runtime.bench.{name}.SHAPES", {**SHAPES, "pair": toy})
    monkeypatch.setattr("runtime.bench.measure._COPIED", {"cuda": 1 << 20, "cpu": 1 << 20})


def run(folder: Path, device: str, *words: object) -> tuple[str, dict[str, Any]]:
    file = folder / "figures.json"
    result = CliRunner().invoke(
        app, ["gpu", *map(str, words), "--device", device, "--rounds", "1", "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert found["machine"]["interpreted"] is (device == "cpu")
    assert ("INTERPRETED or a CPU's own: the times below are no speed" in result.output) is (device == "cpu")
    return result.output, found


def test_decode_compares_schemes_and_widths(tmp_path: Path, device: str) -> None:
    words = ("--shape", "pair", "--scheme", "int4", "--scheme", "bf16", "--widths", "1,3", "--context", 5)
    _, found = run(tmp_path, device, "decode", *words, "--kernels", "plain-torch")
    rows = {(row["scheme"], row["width"]): row for row in found["rows"] if row["what"] == "decode"}
    assert list(rows) == [("bf16", 1), ("bf16", 3), ("int4", 1), ("int4", 3)]
    assert rows["int4", 1]["over_bf16"] > 0 and rows["bf16", 1]["over_bf16"] == 1
    assert all(row["bytes_read"] > 0 and row["share_of_bandwidth"] > 0 for row in rows.values())
    assert found["left_out"] == [] and found["protocol"]["context"] == 5


def test_decode_reads_a_cache_of_the_kind_asked_for(tmp_path: Path, device: str) -> None:
    words = ("--shape", "pair", "--scheme", "int8", "--widths", "1", "--context", 5, "--kernels", "plain-torch")
    read = {}
    for kind in ("float32", "int8"):
        output, found = run(tmp_path, device, "decode", *words, "--cache", kind)
        [row] = [row for row in found["rows"] if row["what"] == "decode"]
        assert row["cache"] == kind and f"({kind} cache)" in output
        read[kind] = row["kv_bytes_read"]
    # A key and a value of 64 each, in int8 with a scale.
    assert read == {"float32": 5 * 2 * 64 * 4, "int8": 5 * 2 * (64 + 4)}


@pytest.mark.slow
def test_kernels_say_which_library_is_left_out(tmp_path: Path, device: str) -> None:
    """Every layer and library is either timed or left out with a reason."""
    schemes = [word for scheme in ("int8", "nf4", "bf16") for word in ("--scheme", scheme)]
    words = ("--shape", "pair", "--widths", "3", "--kernels", "plain-torch", *schemes)
    _, found = run(tmp_path, device, "kernels", *words)
    ours = [row for row in found["rows"] if row["engine"].startswith("specpress")]
    layers = {"qkv", "o", "gate_up", "down"}
    assert {row["layer"] for row in ours} == layers and {row["implementation"] for row in ours} == {None}
    assert all(row["relative_error"] < 0.05 for row in found["rows"])
    told = {(one["engine"], one["scheme"], one["layer"]) for one in found["left_out"]}
    timed = {(row["engine"], row["scheme"], row["layer"]) for row in found["rows"]}
    for name, about in IMPLEMENTATIONS.items():
        for key in ((name, scheme, layer) for scheme in about.schemes for layer in layers if scheme in words):
            assert (key in told) != (key in timed)
    assert all(one["why"] for one in found["left_out"])


def timed(scheme: str, name: str | None, width: int, ms: float, same: bool = True, layer: str = "o") -> dict[str, Any]:
    about = {"shape": "pair", "layer": layer, "scheme": scheme, "implementation": name, "width": width}
    return about | {"ms_median": ms, "same_bits": same}


def test_winners_are_entries_of_the_table_of_choices() -> None:
    rows = [
        *(timed("int8", None, width, 2.0) for width in (1, 16, 64, 512)),
        *(timed("int8", "torch-int-mm", width, ms) for width, ms in ((1, 3.0), (16, 1.99), (64, 1.0), (512, 0.5))),
        *(
            timed("int8", "bitsandbytes", width, ms, same=False)
            for width, ms in ((1, 1.0), (16, 2.0), (64, 3.0), (512, 0.1))
        ),
        *(timed("int4", None, width, 2.0) for width in (1, 16)),
        *(timed("int4", "torch-int4", width, 1.0) for width in (1, 16)),
        # Quicker, but not for all layers.
        *(timed("nf4", None, 1, 2.0, layer=layer) for layer in ("o", "down")),
        timed("nf4", "bitsandbytes", 1, 1.0),
        # By itself the same bits; beside Triton's, others.
        *(timed("fp8", None, width, 2.0) for width in (1, 16)),
        *(timed("fp8", "torch-scaled-mm", width, ms) for width, ms in ((1, 3.0), (16, 1.0))),
    ]
    found = winners(rows, (9, 0), "a GPU")
    entries = [(c.scheme, c.first_row, c.last_row, c.implementation, c.same_bits, c.over_triton) for c in found]
    assert entries == [
        ("int8", 17, None, "torch-int-mm", True, 2.0),
        ("int8", 1, 1, "bitsandbytes", False, 2.0),
        ("int8", 65, None, "bitsandbytes", False, 20.0),
        ("int4", 1, None, "torch-int4", True, 2.0),
        ("fp8", 2, None, "torch-scaled-mm", False, 2.0),
    ]
    assert parse(shown(found), "winners") == tuple(found)
    assert winners(rows[:4], (9, 0), "a GPU") == []


def test_winners_are_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [Choice((9, 0), "int8", 17, None, "torch-int-mm", True, 1.5, "a GPU, torch 2.11.0, Triton 3.6.0")]
    show_choices(found, tmp_path / "choices.json")
    assert parse((tmp_path / "choices.json").read_text(), "choices.json") == tuple(found)
    assert shown(found) in capsys.readouterr().out
    show_choices([], tmp_path / "choices.json")
    assert (tmp_path / "choices.json").read_text() == "[]\n"
    assert "No library was quicker" in capsys.readouterr().out


def test_attention_holds_what_is_computed(tmp_path: Path, device: str) -> None:
    pytest.importorskip("triton")
    words = ("--shape", "pair", "--kind", "int8", "--kind", "float16", "--context", 63, "--batch", 1, "--widths", "1")
    _, found = run(tmp_path, device, "attention", *words)
    rows = {row["scheme"]: row for row in found["rows"]}
    # 64 tokens are one block: what is held is what is computed, for a head of 64.
    assert {kind: row["bytes_held"] for kind, row in rows.items()} == {"int8": 8704, "float16": 16384}
    assert all(row["bytes_held"] == row["bytes_computed"] for row in rows.values())


@pytest.mark.parametrize(("kind", "size"), [("float16", 4096), ("int8", 2112), ("int4", 1088)])
def test_bytes_of_a_cache(kind: str, size: int) -> None:
    """Of one token of the 8B shape: 8 heads of 128, codes and two scales a head."""
    assert computed_bytes(kind, 8, 128, 1) == size


def test_speculation_beside_its_prediction(tmp_path: Path, device: str) -> None:
    words = ("--shape", "pair", "--draft", "pair", "--draft-lengths", "2", "--prompts", 1, "--new-tokens", 5)
    _, found = run(tmp_path, device, "speculate", *words, "--kernels", "plain-torch", "--scheme", "int8")
    [row] = found["rows"]
    assert row["mismatches"] == 0 and row["predicted_speedup"] > 0 and row["speedup"] > 0
    assert row["target_bytes"] == row["draft_bytes"] > 0


def test_batches_of_the_pair(tmp_path: Path, device: str) -> None:
    words = ("--target", PAIR / "target", "--draft", PAIR / "draft", "--sizes", "1,3", "--new-tokens", 4)
    _, found = run(tmp_path, device, "batch", *words)
    assert [(row["batch"], row["prompts"], row["mismatches"]) for row in found["rows"]] == [(1, 1, 0), (3, 3, 0)]


def test_generate_beside_transformers(tmp_path: Path, device: str) -> None:
    words = ("--shape", "pair", "--scheme", "bf16", "--prompt", 3, "--new-tokens", 2, "--kernels", "plain-torch")
    _, found = run(tmp_path, device, "generate", *words)
    assert [row["way"].split(",")[0] for row in found["rows"]] == [
        "transformers",
        "transformers",
        "specpress (plain-torch)",
    ]
    assert all(row["tokens_per_second"] > 0 for row in found["rows"])


def test_tiles_are_sorted_by_time(tmp_path: Path, device: str) -> None:
    pytest.importorskip("triton")
    _, found = run(tmp_path, device, "tune", "--shape", "pair", "--scheme", "ternary", "--widths", "1")
    times = [row["ms_median"] for row in found["rows"] if row["layer"] == "o"]
    assert times == sorted(times) and len(times) >= 2


@pytest.mark.parametrize("scheme", DEVICE_SCHEMES)
def test_random_models_are_seeded_and_run(scheme: str, device: str) -> None:
    models = [random_model("pair", scheme, torch.device(device), "plain-torch") for _ in range(2)]
    found = []
    for model in models:
        cache = model.decoder.new_cache()
        rows = Rows.chains([(cache.open(3), 0, 3)])
        found.append(model.decoder.forward(torch.tensor([1, 2, 3]), rows, cache).logits)
    assert torch.equal(*found) and torch.isfinite(found[0]).all() and found[0].std() > 0.1
    assert read_bytes(models[0].decoder) > 0


@pytest.mark.parametrize("scheme", ["bf16", "int8", "int4", "nf4", "ternary", "fp8"])
def test_random_weights_have_the_variance_that_keeps_outputs_alike(scheme: str, device: str) -> None:
    weight = random_weight(scheme, 64, 256, torch.Generator(device).manual_seed(1))
    values = dequantize(weight) if isinstance(weight, PackedWeight) else weight.float()
    assert values.device.type == device and values.square().mean().item() == pytest.approx(1 / 256, rel=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_without_a_gpu_there_is_one_sentence() -> None:
    result = CliRunner().invoke(app, ["gpu", "decode", "--shape", "pair"])
    assert result.exit_code == 2 and "device 'cuda' was asked for, but torch" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["decode", "--shape", "gpt-9"], "--shape: 'gpt-9' is unknown"),
        (["decode", "--widths", "0"], "--widths: expected numbers from 1 to 256"),
        (["kernels", "--scheme", "int9"], "--scheme: 'int9' is unknown; use one of"),
        (["kernels", "--choices", "c.json"], "--choices compares libraries with Triton's kernels on a GPU"),
        (["attention", "--kind", "fp8"], "--kind: expected float32"),
        (["decode", "--cache", "fp8"], "--cache: expected float32"),
        (["decode", "--rounds", "0"], "--rounds must be at least 1"),
    ],
)
def test_what_is_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["gpu", *words, "--device", "cpu"])
    assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_a_gpu_place_says_what_it_is(device: str) -> None:
    facts = find(device).facts()
    assert {"cpu", "device", "interpreted", "torch"} <= set(facts)
