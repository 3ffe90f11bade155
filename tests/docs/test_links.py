"""README and docs: links and anchors lead somewhere, the README is short, and the map is the tree's."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"(?<!`)\[[^\]]+\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", head).lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_pages_name_files_that_exist(page: Path) -> None:
    names = re.findall(r"`((?:calib|runtime|compress|specpress|examples|tests|docs)/[\w./-]+)`", page.read_text())
    wrong = [name for name in names if not (ROOT / name).exists()]
    assert not wrong


def test_every_page_is_reached_from_the_readme() -> None:
    linked = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {page.name for page in PAGES[1:]} <= {Path(link.partition("#")[0]).name for link in linked}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 170


def test_the_map_is_the_tree() -> None:
    done = subprocess.run([sys.executable, ROOT / "docs/draw_map.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_map_names_every_file() -> None:
    spec = importlib.util.spec_from_file_location("draw_map", ROOT / "docs/draw_map.py")
    assert spec is not None and spec.loader is not None
    draw_map = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_map)
    drawn = draw_map.draw()
    for floor in draw_map.FLOORS:
        for path in (ROOT / floor).rglob("*.py"):
            if path.name != "__init__.py":
                assert f"`{path.name}`" in drawn or f"/{path.name}`" in drawn, path
