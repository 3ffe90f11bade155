"""The command lines of README and docs: their options exist, the cheap ones run, and recipes in them are valid."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from compress.sweep import check_words
from specpress.cli import app
from tests import warm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# python -m NAME → the words of the command `specpress` that do the same.
MODULES = {
    "compress.run": ["compress"],
    "compress.sweep": ["sweep"],
    "compress.export": ["export"],
    "runtime.generate": ["generate"],
    "runtime.bench": ["bench"],
    "runtime.chat": ["chat"],
    "runtime.serve": ["serve"],
    "runtime.models": ["models"],
    "runtime.audit": ["audit"],
    "calib.corpora": [],
    "specpress": [],
}


def code(text: str) -> Iterator[str]:
    """Lines of code blocks, and code within lines."""
    for block in re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from block.splitlines()
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (line[4:] for line in text.splitlines() if line.startswith("    "))
    yield from (" ".join(inline.split()) for inline in re.findall(r"(?<!`)`([^`]+)`(?!`)", text))


def commands(page: Path) -> list[list[str]]:
    """The words after `specpress`, of each command line in a page."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    prefix = next(iter(re.findall(r'B="([^"]+)"', text)), "")
    found = []
    for line in code(text):
        line = line.replace("$B", prefix).split(" && ")[-1]
        words = shlex.split(line, comments=True) if line.count("'") % 2 == 0 else []
        if "-m" in words[:4] and (module := words[words.index("-m") + 1]) in MODULES:
            found.append([*MODULES[module], *words[words.index("-m") + 2 :]])
        elif words[:1] == ["specpress"]:
            found.append(words[1:])
    return found


LINES = [(page.name, words) for page in PAGES for words in commands(page)]


def check(command: Any, words: list[str]) -> None:
    """Parses the words without running anything. Raises for a subcommand or an option that there is not."""
    context = command.make_context("specpress", list(words), resilient_parsing=True)
    rest = [*getattr(context, "_protected_args", []), *context.args]
    if hasattr(command, "commands"):
        if rest:
            _, inner, further = command.resolve_command(context, rest)
            check(inner, further)
    elif rest:
        check_words(rest)  # a sweep's further options go to its runs


@pytest.mark.parametrize(("page", "words"), LINES, ids=[f"{page}: {' '.join(words)}"[:90] for page, words in LINES])
def test_options_exist(page: str, words: list[str]) -> None:
    check(get_command(app), words)


def test_there_are_commands() -> None:
    assert len(LINES) > 40


CHEAP = [
    ["compress", "--list"],
    ["--version"],
    ["--help"],
    ["prompts", "{folder}/prompts.jsonl"],
    ["report", "{run}"],
    ["report", "{run}", "--json"],
    ["generate", "--target", "{run}", "--prompt", "class Counter:", "--max-new-tokens", "64"],
    ["generate", "--target", "{run}", "--prompt", "def ", "--drafter", "lookup"],
    ["push", "{run}", "OWNER/NAME", "--dry-run"],
    ["export", "{run}", "--to", "gptq"],
]


def test_the_cheap_ones_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["compress", "--recipe", "int4-rtn", "--out", str(run), "--no-speed", "--eval-tokens", "0"]
    for line in [words, *CHEAP]:
        given = [word.format(folder=tmp_path, run=run) for word in line]
        done = warm.run("specpress", *given)
        assert done.returncode == 0, (line, done.stderr)


def test_recipes_in_the_docs_are_valid(tmp_path: Path) -> None:
    from compress import Recipe

    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        file = tmp_path / "mine.yaml"
        file.write_text(block)
        assert Recipe.load(str(file)).name == yaml.safe_load(block)["name"]


def test_recipe_table_has_every_built_in_recipe() -> None:
    from compress.recipe import built_in

    for page in (ROOT / "README.md", ROOT / "docs/recipes.md"):
        text = page.read_text(encoding="utf-8")
        missing = [r.name for r in built_in() if f"`{r.name}`" not in text]
        assert missing == (["ternary-rtn"] if page.name == "README.md" else [])
