"""The benchmark command: its rows, what it counts, and how it refuses."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from runtime import native
from runtime.bench import layers as bench_layers
from runtime.bench.__main__ import app
from runtime.bench.forwards import CONTEXT, time_forwards, tree
from runtime.bench.layers import Layer, copies, layers
from runtime.bench.measure import WARM_UP, Sample, cache_bytes, fastest, interleaved, machine, read_bytes, row
from runtime.bench.options import SHAPE_NAMES
from runtime.bench.shapes import SHAPES
from runtime.contract import Rows
from runtime.kernels.dispatch import Kernel, choose
from runtime.model.base import BaseDecoder
from runtime.model.load import load
from tests.runtime.model.families import write

KEYS = {
    *("what", "engine", "scheme", "width", "ms_median", "ms_min", "tokens_per_second", "bytes_read"),
    "gb_per_second",
    *("share_of_bandwidth", "over_width_1"),
}
HAS_NATIVE = native.usable("portable")[0]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth over 16 MiB, and caches of 64 KiB: the figures do not matter here."""
    if HAS_NATIVE:
        reader = native.bandwidth_reader
        monkeypatch.setattr(native, "bandwidth_reader", lambda threads, size: reader(threads, 1 << 24))
    monkeypatch.setattr(bench_layers, "cache_bytes", lambda: 1 << 16)


def command(*arguments: object) -> Any:
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])
    finally:
        torch.set_num_threads(threads)


def measured(folder: Path, *arguments: object) -> tuple[Any, dict[str, Any]]:
    """What was printed, and the file."""
    result = command(*arguments, "--shape", "pair", "--rounds", 2, "--threads", 1, "--json", folder / "rows.json")
    assert result.exit_code == 0, result.output
    assert [path.name for path in folder.iterdir() if path.name != "work"] == ["rows.json"]
    return result, json.loads((folder / "rows.json").read_text())


def forward_bytes(shape: str, scheme: str, head: str, kernel: Kernel) -> int:
    """Bytes of weights that one forward reads, as the kernels hold them."""
    return sum(next(copies(layer, kernel)).nbytes * layer.count for layer in layers(shape, scheme, head))


def check_rows(found: dict[str, Any]) -> None:
    assert set(found) == {"machine", "threads", "kernels", "bandwidth", "protocol", "rows"}
    assert found["threads"] == 1 and found["protocol"]["weights"] == "random, speed only"
    assert (found["bandwidth"] is not None) is HAS_NATIVE
    for values in found["rows"]:
        assert set(values) == KEYS and values["engine"] == "specpress"
        assert 0 < values["ms_min"] <= values["ms_median"]
        assert values["tokens_per_second"] == pytest.approx(values["width"] / values["ms_median"] * 1e3)
        assert values["gb_per_second"] > 0 and (values["share_of_bandwidth"] is not None) is HAS_NATIVE


@pytest.mark.parametrize("kind", ["smollm3", "lfm2", "qwen3_5_text"])
def test_states_count_as_they_are_read_and_written(kind: str, tmp_path: Path) -> None:
    decoder = load(write(kind, tmp_path / kind), threads=1).decoder
    assert isinstance(decoder, BaseDecoder)
    cache = decoder.new_cache()
    states = cache.states(cache.open(8))
    of_one, weights = 0 if states is None else states.memory[0].nbytes, read_bytes(decoder)
    assert (of_one > 0) is (kind != "smollm3") and weights > 0
    rows = time_forwards(decoder, "float32", [("decode", 1), ("decode", 4), ("prefill", 9)], 1, lambda: None, decoder)
    read = {(row["what"], row["width"]): row["bytes_read"] - weights for row in rows}
    one, four = 2 * of_one, 5 * of_one
    assert read == {("decode", 1): one, ("decode", 4): four, ("prefill", 9): one, ("draft", 1): one}


def test_decode_writes_a_row_per_scheme_and_width(tmp_path: Path) -> None:
    result, found = measured(
        tmp_path, "decode", "--scheme", "int4", "--scheme", "ternary", "--widths", "2,1", "--prefill"
    )
    check_rows(found)
    rows = found["rows"]
    assert [(r["scheme"], r["what"], r["width"]) for r in rows] == [
        (scheme, what, width)
        for scheme in ("int4", "ternary")
        for what, width in (("decode", 1), ("decode", 2), ("prefill", 512))
    ]
    assert rows[0]["over_width_1"] == 1 and rows[2]["over_width_1"] is None
    assert rows[1]["over_width_1"] == pytest.approx(rows[1]["ms_median"] / rows[0]["ms_median"])
    kernel = choose("auto", "cpu", 1)
    assert found["kernels"] == kernel.name and found["protocol"]["context"] == CONTEXT
    for values in rows:
        read = forward_bytes("pair", values["scheme"], "int8", kernel)
        assert values["gb_per_second"] * values["ms_median"] * 1e6 == pytest.approx(read)
    assert "random weights: speed only" in result.stdout and result.stderr == ""


@pytest.mark.parametrize("kernels", ["auto", "plain-torch"])
def test_decode_times_the_nested_draft_beside_its_target(tmp_path: Path, kernels: str) -> None:
    options = ("--widths", "1,2", "--kernels", kernels, "--work", tmp_path / "work")
    result, found = measured(tmp_path, "decode", "--scheme", "nested", *options)
    rows = found["rows"]
    assert [(r["scheme"], r["what"], r["width"]) for r in rows] == [
        ("nested", "decode", 1),
        ("nested", "decode", 2),
        ("nested", "draft", 1),
    ]
    # What a draft step costs in steps of the target.
    assert rows[2]["over_width_1"] == pytest.approx(rows[2]["ms_median"] / rows[0]["ms_median"])
    assert "draft" in result.stdout and result.stderr == ""
    if choose(kernels, "cpu", 1).backend.repacks:
        check_rows(found)
        whole, _, half = (r["gb_per_second"] * r["ms_median"] * 1e6 for r in rows)
        assert whole == pytest.approx(forward_bytes("pair", "int8", "int8", choose(kernels, "cpu", 1)), rel=0.02)
        assert half == pytest.approx(whole / 2, rel=0.02)
    # The model is an ordinary int8 one, for which the same folder serves.
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["pair-int8-head-int8"]


@pytest.mark.parametrize("name", ["kernels", "verify"])
def test_nested_is_for_decode(name: str) -> None:
    result = command(name, "--scheme", "nested")
    assert result.exit_code == 2 and "--scheme nested is for `decode`" in result.stderr


def test_verify_always_times_width_1_and_trees_from_three_rows_on(tmp_path: Path) -> None:
    result, found = measured(tmp_path, "verify", "--scheme", "int8", "--widths", "2,5", "--tree")
    check_rows(found)
    assert [(r["what"], r["width"]) for r in found["rows"]] == [("chain", 1), ("chain", 2), ("chain", 5), ("tree", 5)]
    base = found["rows"][0]["ms_median"]
    assert all(r["over_width_1"] == pytest.approx(r["ms_median"] / base) for r in found["rows"])
    assert "γ" in result.stdout and "tree" in result.stdout


@pytest.mark.parametrize("kernels", ["auto", "plain-torch"])
def test_kernels_times_each_layer_and_all_of_them(tmp_path: Path, kernels: str) -> None:
    _, found = measured(tmp_path, "kernels", "--scheme", "int8", "--widths", "1,3", "--kernels", kernels)
    check_rows(found)
    assert found["kernels"] == choose(kernels, "cpu", 1).name
    rows = found["rows"]
    names = ("qkv", "o", "gate_up", "down", "head", "all")
    assert [(r["what"], r["width"]) for r in rows] == [(name, width) for name in names for width in (1, 3)]
    read = {r["what"]: r["gb_per_second"] * r["ms_median"] * 1e6 for r in rows}
    assert read["all"] == pytest.approx(4 * sum(read[name] for name in names[:4]) + read["head"])
    # int8 has a byte a weight, and little beside it.
    assert read["o"] == pytest.approx(512 * 512, rel=0.05) and read["head"] == pytest.approx(4096 * 512, rel=0.05)


def test_the_layers_are_those_of_the_shape() -> None:
    found = layers("qwen2.5-0.5b", "nf4", "keep")
    assert found[0] == Layer("qkv", "nf4", 896 + 2 * 128, 896, 24)
    assert [(layer.outputs, layer.inputs) for layer in found[1:]] == [
        (896, 896),
        (9728, 896),
        (896, 4864),
        (151_936, 896),
    ]
    assert found[-1].scheme == "bf16" and layers("pair", "nf4", "int8")[-1].scheme == "int8"
    assert layers("pair", "f32", "keep")[-1].scheme == "f32"


def test_copies_lie_in_memory_of_their_own() -> None:
    supply = copies(Layer("o", "int8", 64, 64, 1), choose("auto", "cpu", 1))
    first, second = next(supply), next(supply)
    x = torch.randn(3, 64)
    assert first is not second and torch.equal(first(x), second(x))


def test_bytes_of_a_forward() -> None:
    weights = sum(layer.outputs * layer.inputs * layer.count for layer in layers("pair", "bf16", "keep"))
    expected = {
        "auto": {"f32": 4, "bf16": 2, "int8": 1, "int4": 0.5, "nf4": 0.5, "ternary": 0.25, "ternary-1.25": 0.16},
        "plain-torch": {"f32": 4},
    }
    for kernels, sizes in expected.items():
        kernel = choose(kernels, "cpu", 1)
        if kernel.backend.repacks or kernels == "plain-torch":
            for scheme, size in sizes.items():
                head = 512 * 4096 * (0 if scheme in ("f32", "bf16") else 2 - size)
                read = forward_bytes("pair", scheme, "keep", kernel)
                assert read == pytest.approx(weights * size + head, rel=0.08)


def test_a_tree_is_a_binary_one() -> None:
    found = tree(7, 6)
    assert found.request.tolist() == [7] * 6 and found.parent.tolist() == [-1, 0, 0, 1, 1, 2]
    assert [p - CONTEXT for p in found.position.tolist()] == [0, 1, 1, 2, 2, 2]
    chain = Rows.chains([(7, CONTEXT, 2)])
    assert tree(7, 2).parent.tolist() == chain.parent.tolist()
    assert tree(7, 2).position.tolist() == chain.position.tolist()


def test_rounds_are_interleaved_and_the_first_do_not_count() -> None:
    calls: list[str] = []

    def task(name: str) -> Callable[[], float]:
        def run() -> float:
            calls.append(name)
            return float(len(calls))

        return run

    speeds = iter(range(100))
    samples = interleaved({"a": task("a"), "b": task("b")}, 3, lambda: float(next(speeds) % 5))
    assert calls == ["a", "b"] * (WARM_UP + 3)
    # Readings go 0 1 2, 3 4 0, then 1 2 3, 4 0 1, 2 3 4: the better one of two neighbours counts.
    assert samples == {
        "a": [Sample(5.0, 2.0), Sample(7.0, 4.0), Sample(9.0, 3.0)],
        "b": [Sample(6.0, 3.0), Sample(8.0, 1.0), Sample(10.0, 4.0)],
    }
    unmeasured = interleaved({"a": task("a")}, 1, lambda: None)
    assert unmeasured == {"a": [Sample(13.0, None)]}


def test_a_row() -> None:
    # Shares: 5 of 10, 10 of 50, 2.5 of 10 GB/s.
    samples = [Sample(0.2, 10e9), Sample(0.1, 50e9), Sample(0.4, 10e9)]
    found = row("x", "int8", 4, samples, 10**9, [Sample(0.1, 1e9)])
    assert set(found) == KEYS
    assert list(found.values()) == ["x", "specpress", "int8", 4, 200.0, 100.0, 20.0, 10**9, 5.0, 0.25, 2.0]
    unknown = row("x", "int8", 4, [Sample(0.2, None)], 10**9, None)
    assert unknown["gb_per_second"] == 5.0
    assert unknown["share_of_bandwidth"] is None and unknown["over_width_1"] is None
    assert fastest(None, 2.0, 3.0) == 3.0 and fastest(None) is None
    assert cache_bytes() > 1 << 10 and set(machine()) == {"cpu", "cores", "system"}


def test_work_keeps_the_models(tmp_path: Path) -> None:
    work = tmp_path / "work"
    options = ("decode", "--scheme", "int8", "--widths", "1", "--work", work)
    measured(tmp_path, *options)
    (kept,) = work.iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    measured(tmp_path, *options)
    assert {path.name: path.stat().st_mtime_ns for path in kept.iterdir()} == before
    (kept / "config.json").write_text("{}")
    result = command(*options, "--shape", "pair")
    assert result.exit_code == 2 and "holds another model than this version writes; remove it" in result.stderr


@pytest.mark.parametrize("name", ["kernels", "decode", "verify"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--shape", "gpt-9"),
            "shape 'gpt-9' is unknown; use one of tinyllama-1.1b, tinyllama-tenth, llama-3.2-1b, llama-2-7b,",
        ),
        (("--scheme", "int5"), "scheme 'int5' is unknown; use one of f32, bf16, int8, int4, nf4, ternary"),
        (("--head", "none"), "head 'none' is unknown"),
        (("--widths", "1,0"), "--widths: expected numbers from 1 to 512 with commas between them, found '1,0'"),
        (("--widths", "1;2"), "--widths: expected"),
        (("--widths", ""), "--widths: expected"),
        (("--threads", 0), "threads must be at least 1 and at most 1024, found 0"),
        (("--rounds", 0), "--rounds must be at least 1, found 0"),
        (("--kernels", "sse"), "kernels='sse' is unknown"),
        (("--json", "no/such/folder/x.json"), "cannot be a file"),
    ],
)
def test_a_user_s_mistake_is_one_sentence(name: str, arguments: tuple[object, ...], message: str) -> None:
    result = command(name, *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and message in result.stderr


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("runtime.bench.layers.time_layers", interrupt)
    result = command("kernels", "--shape", "pair")
    assert result.exit_code == 130 and "Traceback" not in result.output


def test_help_loads_no_model_library() -> None:
    code = (
        "import sys, runtime.bench.__main__; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    done = subprocess.run([sys.executable, "-m", "runtime.bench", "decode", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--prefill" in done.stdout
    assert all(name in done.stdout for name in ("qwen2.5-0.5b", "ternary")) and tuple(SHAPES) == SHAPE_NAMES
