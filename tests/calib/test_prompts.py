import json
import subprocess
import sys

import pytest

from calib.corpora import Corpus, load
from calib.errors import UserError
from calib.prompts import code_prompts, prompts, prose_prompts

SOURCE = '''import os


class Outer:
    """About it."""

    def method(self, path):
        first = os.path.split(path)
        second = first[0]
        third = first[1]
        fourth = second + third

        return fourth


def short():
    return 1
'''


def corpus_of(*texts: str, are_prompts: bool = False) -> Corpus:
    return Corpus("some text", texts, "0" * 64, are_prompts=are_prompts)


def test_code_prompts_begin_at_definitions_and_stop_half_way() -> None:
    assert code_prompts(SOURCE) == [
        'class Outer:\n    """About it."""\n\n    def method(self, path):\n        first = os.path.split(path)\n',
        "def method(self, path):\n    first = os.path.split(path)\n    second = first[0]\n",
    ]
    assert code_prompts("x = 1\n") == []
    assert code_prompts("This is prose.") is None


def test_prose_prompts_are_beginnings_of_paragraphs() -> None:
    words = [f"word{i}" for i in range(200)]
    text = "# A heading\n\n" + "  " + " ".join(words[:40]) + "\n\n" + "\n".join(words)
    first, second = prose_prompts(text)
    assert first == " ".join(words[:20])
    assert second == "\n".join(words[:48])


def test_held_out_prompts_are_seeded_different_and_spread() -> None:
    corpus = load("stdlib")
    chosen = prompts(corpus, 50, seed=0)
    assert chosen == prompts(corpus, 50, seed=0)
    assert chosen != prompts(corpus, 50, seed=1)
    assert len(set(chosen)) == 50
    assert all(p.startswith(("def ", "async def ", "class ")) and p.endswith("\n") for p in chosen)
    firsts = [p.splitlines()[0] for p in chosen]
    homes = {next(i for i, text in enumerate(corpus.documents) if line in text) for line in firsts}
    assert len(homes) > 25


def test_rows_that_are_prompts_are_taken_whole() -> None:
    corpus = corpus_of("Tell me about gravity.", "def ", are_prompts=True)
    assert sorted(prompts(corpus, 2, seed=0)) == ["Tell me about gravity.", "def "]


def test_too_few_prompts_are_an_error() -> None:
    with pytest.raises(UserError, match="only 2 of 3 prompts"):
        prompts(corpus_of(SOURCE, SOURCE), 3, seed=0)
    with pytest.raises(UserError, match="at least 1"):
        prompts(corpus_of(SOURCE), 0, seed=0)


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "calib.corpora", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command(tmp_path) -> None:
    out = tmp_path / "prompts.jsonl"
    done = run("prompts", out, "--count", 3, "--seed", 5)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == prompts(load("stdlib"), 3, seed=5)
    starts = {"function": ("def ", "async def "), "class": ("class ",)}
    assert all(row["prompt"].startswith(starts[row["category"]]) for row in rows)
    assert list(tmp_path.iterdir()) == [out]
    assert load(str(out)).are_prompts

    done = run("prompts", out, "--source", tmp_path / "gone.txt")
    assert done.returncode == 2
    assert "gone.txt does not exist" in done.stderr
    assert "Traceback" not in done.stderr
    done = run("prompts", tmp_path / "no" / "such" / "folder.jsonl")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    for place in (link, tmp_path):
        done = run("prompts", place, "--count", 1)
        assert done.returncode == 2
        assert "which no file can replace" in done.stderr
