"""What a run will take is said before it starts, and what cannot fit is refused in one sentence."""

import json
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.errors import UserError
from compress.model.source import Source
from compress.model.structure import read_structure
from compress.pipeline import compress, forecast
from compress.pipeline.forecast import Forecast, parse_size
from compress.recipe import Recipe, Rotate
from compress.rotate.stage import plan, rotate
from runtime.checkpoints.open import open_checkpoint

Tiny = Callable[..., Path]
NEED = Forecast(memory=3_000_000_000, held=500_000_000, disk=8_000_000_000, seconds=300)
Usage = namedtuple("Usage", "total used free")


def free(monkeypatch: pytest.MonkeyPatch, memory: int | None, disk: int) -> None:
    monkeypatch.setattr(forecast, "available", lambda: memory)
    monkeypatch.setattr(forecast.shutil, "disk_usage", lambda path: Usage(disk, 0, disk))


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4 * 10**9), ("4 gb", 4 * 10**9), ("512MiB", 512 * 2**20), ("1.5 GiB", 3 * 2**29), ("1000", 1000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "4XB", "-1GB", "0GB", "4GB 2"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UserError, match="--memory-budget: expected a size such as 4GB"):
        parse_size(text)


def test_activations_go_to_a_file_where_they_outgrow_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deep" / "out.partial"
    free(monkeypatch, 4_000_000_000, 9_000_000_000)
    assert forecast.check(NEED, folder, None) is False
    assert forecast.check(NEED, folder, 3_500_000_000) is False
    assert forecast.check(NEED, folder, 3_499_999_999) is True
    free(monkeypatch, 3_200_000_000, 9_000_000_000)
    assert forecast.check(NEED, folder, None) is True
    free(monkeypatch, None, 9_000_000_000)
    assert forecast.check(NEED, folder, None) is False
    assert "activations in memory" in NEED.line(False) and "3.5 GB of memory" in NEED.line(False)
    assert "activations in a file" in NEED.line(True) and "3.0 GB of memory" in NEED.line(True)
    assert "8.0 GB of disk" in NEED.line(True) and "about 5 min" in NEED.line(True)


def test_a_rotation_needs_room_for_its_copy(tiny: Tiny, tmp_path: Path) -> None:
    source = Source("tiny", open_checkpoint(tiny("llama")))
    structure = read_structure(source.path)
    record = plan(source.checkpoint, structure, Rotate(), 0)
    rotate(source.checkpoint, structure, record, tmp_path / "out", 1 << 30)
    need = forecast.with_rotation(NEED, source, structure, record.untied)
    copy = open_checkpoint(tmp_path / "out").bytes_on_disk()
    assert 0.99 * 2 * copy < need.disk - NEED.disk < 1.2 * 2 * copy and need.seconds > NEED.seconds


def test_what_cannot_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out.partial"
    free(monkeypatch, 2_000_000_000, 9_000_000_000)
    with pytest.raises(UserError, match=r"about 3\.0 GB of memory and 2\.0 GB are free: free some"):
        forecast.check(NEED, folder, None)
    with pytest.raises(UserError, match=r"about 3\.0 GB of memory and 1\.0 GB --memory-budget allows: raise it"):
        forecast.check(NEED, folder, 1_000_000_000)
    free(monkeypatch, 4_000_000_000, 7_000_000_000)
    with pytest.raises(UserError, match=r"out\.partial: .* about 8\.0 GB of disk .* 7\.0 GB are free: free some or"):
        forecast.check(NEED, folder, None)
    # What a resumed run has written already is not needed again.
    folder.mkdir()
    free(monkeypatch, 4_000_000_000, 8_000_000_000 - 1000)
    (folder / "part-00000.safetensors").write_bytes(bytes(1000))
    forecast.check(NEED, folder, None)


def test_the_process_tells_what_it_holds() -> None:
    assert 10_000_000 < forecast.resident() < (forecast.available() or 0)


def test_a_run_says_its_forecast_and_keeps_to_its_budget(tiny: Tiny, tmp_path: Path) -> None:
    text = tmp_path / "code.txt"
    text.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))
    recipe = tmp_path / "own.yaml"
    recipe.write_text(json.dumps({"stages": [{"prune": {"method": "wanda", "sparsity": 0.5}}]}))
    lines: list[str] = []

    def go(**options: Any) -> None:
        small = {"calib": str(text), "seq_len": 32, "eval_tokens": 64, "samples": 3, "note": lines.append} | options
        compress(tiny("llama"), recipe, tmp_path / "out", report=lambda *_: {}, **small)

    with pytest.raises(UserError, match="--memory-budget allows"):
        go(memory_budget=1_000_000)
    assert not lines and not (tmp_path / "out.partial").exists()
    go(memory_budget=forecast.resident() + 1_000_000_000)
    assert lines[0].startswith("forecast: ") and "of memory, activations in memory" in lines[0]


def test_the_forecast_grows_with_what_it_counts(tiny: Tiny) -> None:
    from compress.model.plan import make_plan
    from compress.model.source import open_sources
    from compress.model.structure import read_structure

    def of(name: str) -> Forecast:
        target, _ = open_sources(str(tiny("llama")), None)
        recipe = Recipe.load(name)
        plan = make_plan(target.shapes(), read_structure(target.path), recipe.quantize)
        found = forecast.forecast(target, plan, None)
        # Twice the artifact: parts, and the shards that they are joined into.
        assert found.held == 0 and found.seconds > 0 and found.memory > forecast.resident()
        return found

    target, _ = open_sources(str(tiny("llama")), None)
    plain = target.checkpoint.bytes_on_disk()
    rounded = of("int4-rtn")
    assert rounded.disk < of("int8-dynamic").disk < 2 * plain
    # Sequences of a trellis take some tens of times as long as the nearest code.
    assert of("trellis-3").seconds > 3 * rounded.seconds
