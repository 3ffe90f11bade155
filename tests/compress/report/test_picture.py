"""The report as one picture."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compress.report import quality, speed
from compress.report.overview import draw
from compress.report.picture import app
from compress.report.schema import Report

EXAMPLE = Path(__file__).with_name("report_example.json")


@pytest.fixture
def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    return found


def words(found: dict[str, Any]) -> str:
    figure = draw(Report.model_validate(found))
    texts = [text for owner in (figure, *figure.axes) for text in owner.texts]
    return "\n".join(text.get_text() for text in texts)


def test_it_shows_size_quality_and_speed(report: dict[str, Any]) -> None:
    shown = words(report)
    for figure in (
        "nf4 · pair-target",
        "2.62×",
        "+1.21 %",
        "1.18×",
        "31.2 MB",
        "17.52",
        "84",
        "4.13 bits",
        "KL 0.0132",
    ):
        assert figure in shown
    assert "0 of" in shown and "acceptance α 0.52" in shown


def test_what_was_not_measured_says_so(report: dict[str, Any]) -> None:
    nothing, (comparison, unknown) = speed.not_measured(), quality.not_measured(512, "keep")
    report |= {"speed": nothing.speed, "lossless": nothing.lossless}
    report["quality"] |= comparison.model_dump()
    report["not_measured"] |= nothing.not_measured | unknown
    shown = words(report)
    assert "--no-speed" in shown and "--eval-tokens 0" in shown
    assert len(draw(Report.model_validate(report)).axes) == 1


def test_the_command_writes_svg_and_png(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(EXAMPLE.read_text(encoding="utf-8"))
    starts = {"one.svg": b"<?xml", "deep/one.png": b"\x89PNG"}
    for name, start in starts.items():
        result = CliRunner().invoke(app, [str(tmp_path), "--out", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert (tmp_path / name).read_bytes().startswith(start)
    first = (tmp_path / "one.svg").read_bytes()
    CliRunner().invoke(app, [str(tmp_path), "--out", str(tmp_path / "one.svg")])
    assert (tmp_path / "one.svg").read_bytes() == first
    result = CliRunner().invoke(app, [str(tmp_path), "--out", str(tmp_path / "one.gif")])
    assert result.exit_code == 2 and "found one.gif" in result.output
