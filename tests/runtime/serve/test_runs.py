"""What the page is told of run folders, whoever wrote what is in them."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import UserError
from runtime.serve.runs import MOST_BYTES, listed, recipe_text, report_page, row
from tests.runtime.serve.run_folders import random_report, write_run


def test_runs_and_sweeps_are_found_below_a_folder_and_nothing_inside_of_them(tmp_path: Path) -> None:
    generator = random.Random(0)
    for name in ("b", "a/c", "a/d/e"):
        write_run(tmp_path / name, generator)
    write_run(tmp_path / "b" / "model", generator)
    write_run(tmp_path / "1" / "2" / "3" / "4" / "5", generator)
    (tmp_path / "a" / "sweep.json").write_text("{}")
    (tmp_path / "a" / "sweep.html").write_text("<p>all</p>")
    found = listed(tmp_path)
    assert list(found) == ["a (sweep)", "a/c", "a/d/e", "b"]
    assert report_page(found["a (sweep)"]) == b"<p>all</p>" and row(found["a (sweep)"])["has_page"]
    told = row(found["b"])
    report = json.loads((tmp_path / "b" / "report.json").read_text())
    assert told["problem"] is None and told["compressed_bytes"] == report["size"]["compressed_bytes"]
    speeds = [report["speed"][way]["tokens_per_second"] for way in ("original", "compressed", "speculative")]
    assert told["speed"] == pytest.approx(max(speeds[1:]) / speeds[0])
    assert recipe_text(found["b"]) == "name: b\n" and (report_page(found["b"]) or b"").startswith(b"<!doctype")
    with pytest.raises(UserError, match="--runs"):
        listed(tmp_path / "none")


def test_links_pipes_and_files_that_are_too_large_are_told_and_not_read(tmp_path: Path) -> None:
    generator = random.Random(0)
    outside = write_run(tmp_path / "outside" / "run", generator)
    folder = tmp_path / "runs"
    for name in ("linked", "piped", "large"):
        write_run(folder / name, generator)
    (folder / "whole").symlink_to(outside, target_is_directory=True)
    for name in ("report.json", "report.html", "recipe.yaml"):
        for run in ("linked", "piped", "large"):
            (folder / run / name).unlink()
        (folder / "linked" / name).symlink_to(outside / name)
        os.mkfifo(folder / "piped" / name)
        with (folder / "large" / name).open("wb") as file:
            file.truncate(MOST_BYTES + 1)
    found = listed(folder)
    assert set(found) == {"linked", "piped", "large", "whole"}
    for one in found.values():
        assert row(one)["problem"] and row(one)["compressed_bytes"] is None
        if one.name != "whole":
            assert recipe_text(one) is None and report_page(one) is None
    assert "links are not followed" in row(found["whole"])["problem"] and not row(found["whole"])["has_page"]


def test_any_report_makes_a_row_that_can_be_sent(tmp_path: Path) -> None:
    generator = random.Random(7)
    values: list[Any] = [None, True, "x\ud800", 10**400, -1, [], {}, "<b>", [{}], 1e308, 0]

    def spoil(report: Any) -> Any:
        if isinstance(report, dict) and generator.random() < 0.9:
            return {key: spoil(value) for key, value in report.items() if generator.random() < 0.95}
        return generator.choice(values) if generator.random() < 0.4 else report

    problems = 0
    for number in range(200):
        report = spoil(random_report("r", generator))
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "report.json").write_text(json.dumps(report))
    (tmp_path / "nan").mkdir()
    (tmp_path / "nan" / "report.json").write_text('{"schema": 2, "recipe": "a", "size": {"ratio": NaN, "x": Infinity}}')
    found = listed(tmp_path)
    assert len(found) == 201
    for one in found.values():
        told = row(one)
        json.dumps(told, allow_nan=False).encode()
        problems += told["problem"] is not None
    assert 0 < problems < 201
    assert row(found["nan"])["ratio"] is None and row(found["nan"])["recipe"] == "a"
