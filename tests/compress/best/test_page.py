"""The page shows what plan.json has, loads nothing, and is drawn without a figure of its own."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from compress.best import bit_map, plots
from compress.best.budgets import Budgets
from compress.best.page import html, markdown
from compress.best.plan import write
from tests.compress.best.random_plan import random_plan
from tests.compress.report.test_page import Outline

ASKED = [
    Budgets(quality=0.01),
    Budgets(quality=0.01, disk=1_500_000, memory=4_000_000),
    Budgets(kl=0.02, disk=3_000_000, latency=3.0, ttft=80.0, goal="size"),
]


@pytest.fixture(scope="module", params=range(len(ASKED)))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A plan's folder, and its plan.json."""
    folder = tmp_path_factory.mktemp("plan")
    write(random_plan(request.param, 2, ASKED[request.param]), folder)
    return folder, json.loads((folder / "plan.json").read_text())


def test_both_texts_follow_from_the_json_file(written: tuple[Path, dict[str, Any]]) -> None:
    folder, data = written
    assert (folder / "plan.html").read_text() == html(data)
    assert (folder / "plan.md").read_text() == markdown(data)
    other = {**data, "model": "another <b>model</b> | of `mine`"}
    assert "another &lt;b&gt;model&lt;/b&gt;" in html(other) and "<b>" not in html(other)
    assert r"another \<b\>model\</b\> \| of \`mine\`" in markdown(other)


def test_the_page_is_whole_and_loads_nothing(written: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = written
    text = (folder / "plan.html").read_text()
    outline = Outline(text)
    assert not outline.open and "script" not in outline.tags
    assert all(place.startswith("data:image/svg+xml") or place == "best/report.html" for place in outline.loads)
    assert "http" not in re.sub(r"data:[^\"]*", "", text)
    for content in re.findall(r"base64,([^\"]+)", text):
        assert "<script" not in base64.b64decode(content).decode()


def test_all_that_was_asked_and_found_is_shown(written: tuple[Path, dict[str, Any]]) -> None:
    folder, data = written
    for text in ((folder / "plan.html").read_text(), (folder / "plan.md").read_text()):
        assert text.count("chosen") >= 1 and "breaks the budget of quality" in text
        for one in data["candidates"]:
            assert f"{one['measured']['disk'] / 1e6:.2f}" in text
        assert "damages of layers" in text and f"{data['about']['damages']} " in text.replace(",", " ")
        learned, rotated = data["further"]
        assert f"learned.yaml: about {max(round(learned['seconds'] / 60), 1)} min more" in text
        assert rotated["does"] in text and "not offered: integers gain" in text and "rotated.yaml" not in text
        assert (folder / "learned.yaml").is_file() and not (folder / "rotated.yaml").exists()
        for one in data["not_tried"]:
            assert one["why"].split(":")[0] in text.replace("&#39;", "'")
        assert ("first token" in text) == (data["budgets"]["ttft_ms"] is not None)
    for name in ("quality", "kl", "disk_bytes", "memory_bytes", "latency_ms", "ttft_ms"):
        option = f"<code>--{name.removesuffix('_bytes').removesuffix('_ms')}"
        assert (option in (folder / "plan.html").read_text()) == (data["budgets"][name] is not None)


def test_tables_of_the_text_are_whole(written: tuple[Path, dict[str, Any]]) -> None:
    text = (written[0] / "plan.md").read_text()
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 3 + bool(written[1]["prices"]["upgrades"])
    for table in tables:
        rows = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len(rows) >= 3 and len(set(rows)) == 1 and table.splitlines()[1].startswith("|---|")


def test_the_map_has_every_unit_where_it_is(written: tuple[Path, dict[str, Any]]) -> None:
    units = written[1]["units"]
    drawn = bit_map.draw(units)
    assert drawn.blocks == (0, 1) and len(drawn.rows) == 4
    cells = {cell.words for _, row in drawn.rows for cell in row if cell is not None}
    assert cells == {f"block {unit['block']}, {bit_map.layer(unit)}: {unit['option']}" for unit in units}
    assert sum(one.units for one in drawn.legend) == len(units)
    assert sum(one.share for one in drawn.legend) == pytest.approx(1.0)
    assert len({one.colour for one in drawn.legend}) == len(drawn.legend)


def test_a_block_without_a_unit_and_an_option_without_a_colour_have_their_place() -> None:
    units = [
        {"name": "h.0.a", "block": 0, "weights": 3, "option": "new5 g9 odd", "bits": 5},
        {"name": "h.1.b", "block": 1, "weights": 1, "option": "as it is", "bits": 16},
    ]
    drawn = bit_map.draw(units)
    assert [[cell is not None for cell in row] for _, row in drawn.rows] == [[True, False], [False, True]]
    assert [one.option for one in drawn.legend] == ["as it is", "new5 g9 odd"]


def test_points_stand_at_their_figures(written: tuple[Path, dict[str, Any]]) -> None:
    _, data = written
    asked = [name for name in ("disk", "memory") if data["budgets"][f"{name}_bytes"]] or ["disk"]
    (figure, _), *_ = plots.fronts(data)
    axes = figure.axes[0]
    named = {str(line.get_gid()).split(",")[0]: line for line in axes.lines if line.get_gid()}
    for number, one in enumerate(data["candidates"], 1):
        line = named[str(number)]
        assert line.get_xdata()[0] == pytest.approx(one["measured"][asked[0]] / 1e6)
        assert ("chosen" in str(line.get_gid())) == (one["key"] == data["winner"])
    labels = {text.get_text() for text in axes.texts}
    assert any(label.startswith("--kl" if data["budgets"]["kl"] else "--quality") for label in labels)
    for name in asked:
        assert any(f"--{name}" in label for label in labels) == (data["budgets"][f"{name}_bytes"] is not None) or (
            name != asked[0]
        )


def test_prices_are_of_the_chosen_one(written: tuple[Path, dict[str, Any]]) -> None:
    _, data = written
    chosen = next(one for one in data["candidates"] if one["key"] == data["winner"])
    for one in data["prices"]["upgrades"]:
        assert one["before"] == chosen["choice"][one["unit"]] != one["after"]
        assert one["bytes"] > 0 and one["per_megabyte"] == pytest.approx(one["gain"] * 1e6 / one["bytes"])
    figures = [one["figure"] for one in data["prices"]["steps"]]
    assert len(figures) >= 3 and figures == sorted(figures, reverse=True)
    assert all(one["disk"] <= chosen["measured"]["disk"] + one["bytes"] for one in data["prices"]["steps"])
