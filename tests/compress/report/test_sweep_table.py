"""The table of many reports: which recipes are dominated, what the page and the plot show."""

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import UserError
from compress.report import speed, sweep_page
from compress.report.figure import png, svg
from compress.report.schema import Report
from compress.report.sweep_plot import pareto
from compress.report.sweep_table import Point, SweepTable, dominated, sweep_table


def make_report(name: str, size: int, change: float, pace: float | None, **parts: Any) -> dict[str, Any]:
    """The example's report as if `name` had `size` bytes, `change` of perplexity, and `pace` over the original's."""
    report: dict[str, Any] = json.loads(Path(__file__).with_name("report_example.json").read_text(encoding="utf-8"))
    report["recipe"] = report["asked"]["recipe"]["name"] = name
    report["asked"]["recipe"]["about"] = f"about {name}"
    report["size"]["compressed_bytes"] = size
    report["size"]["ratio"] = report["size"]["original_bytes"] / size
    original = report["quality"]["perplexity"]["original"]
    report["quality"]["perplexity"]["compressed"] = original * (1 + change)
    if pace is None:
        nothing = speed.not_measured()
        report |= {"speed": nothing.speed, "lossless": nothing.lossless}
        report["not_measured"] |= nothing.not_measured
    else:
        report["speed"]["original"]["tokens_per_second"] = 100.0
        report["speed"]["compressed"]["tokens_per_second"] = 100 * pace
        report["speed"]["speculative"]["tokens_per_second"] = 50 * pace
    for path, value in parts.items():
        section, key = path.split("__")
        report[section][key] = value
    return report


def several() -> dict[str, dict[str, Any] | str]:
    mb = 1_000_000
    return {
        "int8-dynamic": make_report("int8-dynamic", 16 * mb, 0.001, 1.9),
        "nf4": make_report("nf4", 10 * mb, 0.010, 2.2),
        "int4-rtn": make_report("int4-rtn", 10 * mb, 0.016, 2.1),
        "broken": "recipe pattern 'x' matches no linear layer",
    }


def table_of(command: str, found: dict[str, dict[str, Any] | str]) -> SweepTable:
    return sweep_table(command, {n: r if isinstance(r, str) else Report.model_validate(r) for n, r in found.items()})


def test_rows_are_the_reports_figures() -> None:
    found = table_of("command", several())
    assert [row.recipe for row in found.rows] == ["int8-dynamic", "nf4", "int4-rtn", "broken"]
    first, second, third, broken = found.rows
    assert first.compressed_bytes == 16_000_000 and first.speed == pytest.approx(1.9)
    assert first.tokens_per_second == pytest.approx(190) and first.speculative_tokens_per_second == pytest.approx(95)
    assert second.perplexity_change == pytest.approx(0.010) and second.ci95 is not None
    assert third.dominated_by == ("nf4",) and first.dominated_by == second.dominated_by == ()
    assert broken.failed == "recipe pattern 'x' matches no linear layer" and broken.dominated_by == ()
    assert broken.point == (None, None, None, None)
    assert found.original is not None and found.original.bytes > 16_000_000
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["schema"] == 1 and plain["rows"][2]["dominated_by"] == ["nf4"]


def test_speculation_counts_where_it_is_faster() -> None:
    report = make_report("nf4", 10, 0.0, 2.0)
    report["speed"]["speculative"]["tokens_per_second"] = 300.0
    assert table_of("", {"nf4": report}).rows[0].speed == pytest.approx(3.0)


def test_a_quantised_cache_is_judged_with_its_perplexity() -> None:
    plain = make_report("plain", 10, 0.0, 1.0)
    original = plain["quality"]["perplexity"]["original"]
    cached = make_report("kv-int4", 10, 0.0, 1.0, quality__kv_perplexity=1.02 * original)
    cached["size"]["kv_bytes_per_token"]["compressed"] = plain["size"]["kv_bytes_per_token"]["compressed"] // 5
    rows = table_of("", {"plain": plain, "kv-int4": cached}).rows
    assert rows[1].perplexity_change == pytest.approx(0.02) and rows[1].ci95 is None
    assert rows[0].dominated_by == rows[1].dominated_by == ()  # better quality, or a smaller cache


figures = st.one_of(st.none(), st.integers(0, 4).map(float))
complete = st.tuples(*[st.integers(0, 4).map(float)] * 3)


@given(st.lists(st.tuples(figures, figures, figures), max_size=7))
def test_nothing_outdoes_itself_or_what_outdoes_it(points: list[Point]) -> None:
    found = dominated(points)
    for i, better in enumerate(found):
        assert i not in better
        for j in better:
            assert i not in found[j]
            pairs = [(a, b) for a, b in zip(points[j], points[i], strict=True) if a is not None and b is not None]
            assert pairs and all(a <= b for a, b in pairs)


@given(st.lists(complete, min_size=1, max_size=8))
def test_the_front_outdoes_all_others(points: list[Point]) -> None:
    found = dominated(points)
    front = {i for i, better in enumerate(found) if not better}
    assert front
    for i, better in enumerate(found):
        assert i in front or front & set(better)
        # Transitive: whatever outdoes something that outdoes this, outdoes this.
        assert all(set(found[j]) <= set(better) for j in better)
    # The least of each figure is on the front somewhere.
    for axis in range(3):
        assert min(point[axis] for point in points) == min(points[i][axis] for i in front)  # type: ignore[type-var]


@given(st.lists(complete, min_size=1, max_size=6), st.data())
def test_another_that_is_worse_changes_no_verdict(points: list[Point], data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from(points))
    worse = tuple((figure or 0.0) + data.draw(st.integers(1, 3)) for figure in chosen)
    found = dominated([*points, worse])
    assert [bool(better) for better in found[:-1]] == [bool(better) for better in dominated(points)]
    assert points.index(chosen) in found[-1]


@pytest.mark.parametrize(
    ("section", "key", "value", "what"),
    [
        ("corpus", "sha256", "0" * 64, "text"),
        ("protocol", "tokens", 99, "windows"),
        ("perplexity", "original", 1.0, "original model"),
    ],
)
def test_only_the_same_model_and_text_are_compared(section: str, key: str, value: Any, what: str) -> None:
    found = several()
    other = copy.deepcopy(found["nf4"])
    assert isinstance(other, dict)
    other["quality"][section][key] = value
    found["nf4"] = other
    with pytest.raises(UserError, match=f"nf4: expected a report on the same {what} as int8-dynamic's"):
        table_of("", found)


def test_page_and_markdown() -> None:
    found = table_of("python -m compress.sweep --recipes <b>", several())
    html, markdown = sweep_page.html(found, b"<svg/>"), sweep_page.markdown(found)
    for text in (html, markdown):
        assert "16.0 MB" in text and "1.90×" in text and "about nf4" in text
        assert "int4-rtn is dominated by nf4" in text and "Not outdone by any other here:" in text
    assert "+1.60 %" in html and "+1.60 %" in markdown
    assert "<b>" not in html and "recipe pattern &#39;x&#39;" in html
    rows = re.findall(r'<tr class="(\w+)"><th scope="row">(?:<a href="([^"]*)">)?([\w-]+)', html)
    assert rows == [
        ("original", "", "original"),
        ("dominated", "int4-rtn/report.html", "int4-rtn"),
        ("failed", "", "broken"),
    ]
    open_tags: list[str] = []

    class Outline(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in ("meta", "img", "br"):
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Outline().feed(html)
    assert open_tags == []
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table[:7]}) == 1


def test_a_table_without_any_report() -> None:
    found = table_of("command", {"a": "no", "b": "no"})
    assert pareto(found) is None and found.original is None
    assert "a failed: no" in sweep_page.markdown(found) and "a failed: no" in sweep_page.html(found, None)


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("largest", [0.04, 3.0])
def test_the_plot_names_every_recipe_and_greys_the_dominated(timed: bool, largest: float) -> None:
    reports: dict[str, Any] = {
        f"recipe-{i}": make_report(f"recipe-{i}", (20 - i) * 1_000_000, change, 1 + 0.1 * i if timed else None)
        for i, change in enumerate((0.001, -0.002, 0.03, largest))
    }
    reports["worse"] = make_report("worse", 25_000_000, 0.9 * largest, 0.5 if timed else None)
    found = table_of("", reports)
    figure = pareto(found)
    assert figure is not None and len(figure.axes) == (2 if timed else 1)
    for axes in figure.axes:
        names = {text.get_text(): text.get_color() for text in axes.texts}
        assert set(names) == {*reports, "original"}
        points = {line.get_gid(): line for line in axes.lines if line.get_gid()}
        assert points["worse"].get_markerfacecolor() == "white"
        assert points["recipe-1"].get_markerfacecolor() != "white"
        assert names["worse"] != names["recipe-1"]
        low, high = axes.get_ylim()
        assert low < -0.2 and high > 100 * largest
    assert png(figure).startswith(b"\x89PNG")
    assert svg(figure).count(b"<svg") == 1


def test_the_plot_is_the_same_bytes_for_the_same_figures() -> None:
    found = table_of("", several())
    first, second = pareto(found), pareto(found)
    assert first is not None and second is not None and svg(first) == svg(second)
