"""Quality and speed of exports in the report; those in ONNX need the extra `onnx`."""

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import Artifact, Recipe
from compress.artifact import manifest
from compress.context import RunContext
from compress.export.onnx import graph as onnx_graph
from compress.pipeline import compress
from compress.report import baselines, exports, page, quality
from compress.report.schema import Report
from runtime import load

Tiny = Callable[..., Path]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "code.txt"
    file.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(400)))
    return file


@pytest.fixture(scope="module")
def artifact(tiny: Tiny, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of int4 with a draft, three exports and everything measured but the baselines."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    out = tmp_path_factory.mktemp("run") / "int4"
    options = dict[str, Any](
        draft=str(tiny("llama")),
        calib=str(text),
        seq_len=48,
        samples=2,
        eval_tokens=192,
        new_tokens=8,
        draft_length=2,
        threads=1,
        export=("onnx", "gptq", "bitsandbytes"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "run", partial(baselines.run, limit=0.5))
        # Target and draft have one architecture, whose tracing takes seconds.
        traced = cache(onnx_graph.trace)
        patch.setattr(onnx_graph, "trace", lambda _, dtype: _copied(*traced(tiny("llama"), dtype)))
        return compress(tiny("llama"), "int4-rtn", out, **options).path


def _copied(graph: Any, sizes: Any) -> tuple[Any, Any]:
    return graph.clone(), sizes


def figures(report: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry["measured"] for entry in report["exports"]}


def test_a_run_measures_its_exports(artifact: Path) -> None:
    Artifact(artifact).verify()
    report = Artifact(artifact).report
    Report.model_validate(report)
    found = figures(report)
    assert list(found) == ["bitsandbytes", "gptq", "onnx"]
    ours = report["quality"]["perplexity"]["compressed"]
    for name, figure in found.items():
        # All evaluation windows are few enough for exports.
        assert figure["artifact_perplexity"] == pytest.approx(ours) and figure["tokens"] == 188
        assert figure["perplexity"] == pytest.approx(ours, rel=0.05 if name == "bitsandbytes" else 2e-3)
    assert found["gptq"]["perplexity"] == found["gptq"]["artifact_perplexity"] != found["bitsandbytes"]["perplexity"]
    speed = found["onnx"]["speed"]
    assert found["onnx"]["engine"] == "onnxruntime" and speed["drafter"] == "draft on onnxruntime"
    assert speed["tokens_per_second"] > 0 and speed["speculative_tokens_per_second"] > 0
    assert (speed["tokens_compared"], speed["mismatches"], speed["class"]) == (8 * exports.PROMPTS, 0, "measured")
    assert 0 <= speed["acceptance_rate"] <= 1
    assert found["gptq"]["speed"] is None
    assert "at the speed that is measured for the artifact" in report["not_measured"]["exports.1.measured.speed"]


def test_nothing_of_the_measuring_stays(artifact: Path) -> None:
    assert sorted(path.name for path in (artifact / "exports").iterdir()) == ["bitsandbytes", "gptq", "onnx"]
    # Figures that differ from run to run are the report's alone.
    assert all("measured" not in entry for entry in manifest.read(artifact)["exports"])


def test_the_pages_show_the_figures(artifact: Path) -> None:
    report = Artifact(artifact).report
    speed = figures(report)["onnx"]["speed"]
    for name in ("report.md", "report.html"):
        content = (artifact / name).read_text()
        assert f"{figures(report)['bitsandbytes']['perplexity']:,.3f}" in content
        assert f"{speed['tokens_per_second']:,.1f}" in content and "draft on onnxruntime" in content
        assert "0 of 32" in content and str(artifact.parent) not in content


def test_exports_that_come_later_leave_the_figures_of_others(artifact: Path, tmp_path: Path) -> None:
    from compress import export
    from compress.pipeline import exports

    folder = Path(shutil.copytree(artifact, tmp_path / "int4"))
    before = figures(Artifact(folder).report)
    names = ("awq", "gptq")
    exports.add(folder, [export.run(n, folder / "model", folder / "exports" / n, force=True) for n in names])
    report = Artifact(folder).report
    Report.model_validate(report)
    after = figures(report)
    assert list(after) == ["awq", "bitsandbytes", "gptq", "onnx"]
    assert after["awq"] is None and after["gptq"] is None and after["onnx"] == before["onnx"]
    missing = report["not_measured"]
    assert "after the report was made" in missing["exports.0.measured"] == missing["exports.2.measured"]
    assert "exports.1.measured.speed" in missing and "exports.3.measured.speed" not in missing
    assert "awq" in (folder / "report.md").read_text()


def task(folder: Path, **options: Any) -> exports.Task:
    windows = torch.randint(1, 300, (3, 40), generator=torch.Generator().manual_seed(0))
    run = RunContext(Recipe.load("nf4"), threads=1, draft_length=options.pop("draft_length", 2))
    given: dict[str, Any] = {"windows": windows, "perplexity": 300.0, "prompts": [[5, 9, 17]], "new_tokens": 6}
    return exports.Task(folder, **{"draft": None, "run": run, **given, **options})


def entry(name: str) -> dict[str, Any]:
    return {"name": name, "bytes": 1, "repacked": 0, "requantized": [], "worst": None, "notes": []}


def test_an_export_that_cannot_be_read_has_a_reason(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "good")
    shutil.copytree(tiny("llama"), tmp_path / "bad")
    whole = (tmp_path / "bad" / "model.safetensors").read_bytes()
    (tmp_path / "bad" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    found, missing = exports.measure([entry("bad"), entry("good")], task(tmp_path))
    assert found[0].measured is None and "model.safetensors" in missing["exports.0.measured"]
    assert 200 < found[1].measured.perplexity < 500
    assert set(missing) == {"exports.0.measured", "exports.1.measured.speed"}


def test_without_quality_and_speed(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "good")
    nothing = task(tmp_path, windows=torch.zeros((0, 40), dtype=torch.int64), perplexity=None, prompts=())
    found, missing = exports.measure([entry("good")], nothing)
    figure = found[0].measured
    assert (figure.tokens, figure.perplexity, figure.speed) == (0, None, None)
    assert "--eval-tokens 0" in missing["exports.0.measured.perplexity"]
    entries, missing = exports.not_measured([entry("good")], "because")
    assert entries[0].measured is None and missing == {"exports.0.measured": "because"}


def test_without_a_draft(artifact: Path) -> None:
    found, _ = exports.measure([entry("onnx")], task(artifact / "exports", draft_length=3))
    speed = found[0].measured.speed
    assert speed.drafter == "lookup" and speed.tokens_per_second > 0
    assert (speed.tokens_compared, speed.mismatches) == (6, 0)


def test_a_draft_without_an_onnx_form_drafts_on_our_kernels(
    artifact: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress import export
    from compress.errors import UserError

    def refuse(*_: Any) -> None:
        raise UserError("export onnx: no such layer")

    monkeypatch.setattr(export, "run", refuse)
    found, _ = exports.measure([entry("onnx")], task(artifact / "exports", draft=tiny("llama")))
    figure = found[0].measured
    assert figure.speed.drafter.startswith("draft on ") and "onnxruntime" not in figure.speed.drafter
    assert figure.speed.mismatches == 0
    assert figure.notes == [
        "its draft ran on the runtime's own kernels, because it has no ONNX form: export onnx: no such layer"
    ]


def test_held_out_windows_are_bounded() -> None:
    assert exports.held_out(torch.zeros(50, 512)).shape == (8, 512)
    assert exports.held_out(torch.zeros(3, 8192)).shape == (1, 8192)
    assert exports.held_out(torch.zeros(0, 512)).shape == (0, 512)


def test_perplexity_of_windows_that_do_not_fit(tiny: Tiny) -> None:
    from compress.errors import USER_ERRORS

    decoder = load(tiny("llama")).decoder
    with pytest.raises(USER_ERRORS, match="at most the model's 256 positions, found 300"):
        quality.perplexity(decoder, torch.ones((1, 300), dtype=torch.int64), "the logits")


def test_reports_without_figures_are_still_shown() -> None:
    """Those that were written before there were any."""
    report = json.loads(Path(__file__).with_name("report_example.json").read_text(encoding="utf-8"))
    report["exports"] = [entry("gptq")]
    assert "## Exports" in page.markdown(Report.model_validate(report))
