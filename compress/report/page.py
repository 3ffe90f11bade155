"""report.md and report.html from the report: the same figures and the same sentences in both.

The page loads nothing, runs nothing, and everything in it is escaped.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress.report import sections, wording
from compress.report.plots import all_plots
from compress.report.schema import Report

_TEMPLATES = Path(__file__).parent / "templates"
# Control characters and their Unicode pictures: models write anything, and files must stay text.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}


def html(report: Report) -> str:
    return render("report.html.j2", {**_view(report), "plots": all_plots(report)}, autoescape=True)


def markdown(report: Report) -> str:
    """The same for GitHub and terminals, without plots."""
    text = render("report.md.j2", _view(report), autoescape=False, cell=cell, fenced=fenced)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def cell(text: str) -> str:
    """Text that stays one cell of a Markdown table, and text: no pipe, line break or tag of it takes effect."""
    plain = " ".join(text.split())
    return re.sub(r"([\\`*_|\[\]<>])", r"\\\1", plain)


def fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def _view(report: Report) -> dict[str, Any]:
    return {
        "report": report,
        "sample": {key: str(text).translate(_PICTURES) for key, text in dict(report.sample or ()).items()},
        "title": f"{report.recipe} · {report.model}",
        "about": report.asked.recipe.get("about", ""),
        "headlines": wording.headlines(report),
        "findings": wording.findings(report),
        "lossless": wording.lossless(report),
        "asked": sections.asked(report),
        "sections": sections.measured(report),
        "left_alone": sections.left_alone(report),
        "layers": sections.layers(report),
        "missing": sections.missing(report),
        "machine_and_versions": sections.machine_and_versions(report),
    }


def render(name: str, view: dict[str, Any], autoescape: bool, **filters: Callable[[str], str]) -> str:
    """A template filled in."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(filters)
    return environment.get_template(name).render(view)
