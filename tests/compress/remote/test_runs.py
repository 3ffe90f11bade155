"""Sweeps on the nodes of a Ray cluster: the same figures as here, whatever is lost; one run at a time on each node."""

import json
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from compress.remote import runs as remote
from compress.remote.runs import Arriving, Damaged
from compress.sweep import load_recipes, sweep
from tests.ray_cluster import nodes

Tiny = Callable[..., Path]
RECIPES = "nf4,int8-dynamic,int4-rtn,int4-gptq,int3-gptq,int8-smoothquant"
# Of a row of the table, all that no clock decides.
TIMES = ("tokens_per_second", "speed", "seconds", "dominated_by")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "code.txt"
    path.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))
    return path


def _words(model: Path, text: Path, *more: str) -> list[str]:
    return [
        *("--model", str(model), "--calib", str(text), "--seq-len", "32", "--eval-tokens", "64"),
        *("--samples", "2", "--new-tokens", "4", "--threads", "1", *more),
    ]


def _untimed(folder: Path, names: list[str]) -> list[Any]:
    """Size and quality of each run, and the bytes of its weights."""
    out: list[Any] = []
    for name in names:
        report = json.loads((folder / name / "report.json").read_text())
        out.append([report["size"] | {"peak_memory_bytes": None}, report["quality"]])
        out.append((folder / name / "manifest.json").read_bytes())
    return out


def test_a_folder_comes_whole_or_not_at_all(tmp_path: Path) -> None:
    from hashlib import sha256

    arriving = Arriving(tmp_path / "run")
    arriving.take("model/a", 0, b"one")
    arriving.take("model/a", 3, b"two")
    with pytest.raises(Damaged):
        arriving.whole("out", {"model/a": sha256(b"onetwo").hexdigest(), "b": sha256(b"").hexdigest()})
    with pytest.raises(Damaged):
        arriving.whole("out", {"model/a": sha256(b"another").hexdigest()})
    with pytest.raises(Damaged):
        arriving.take("../above", 0, b"")
    with pytest.raises(Damaged):
        arriving.take("model/a", 7, b"a piece too late")
    assert not (tmp_path / "run").exists()
    arriving.whole("partial", {"model/a": sha256(b"onetwo").hexdigest()})
    arriving.take("model/a", 0, b"new")  # does not reach what is in its place already
    assert (tmp_path / "run.partial" / "model" / "a").read_bytes() == b"onetwo"
    arriving.whole("out", {"model/a": sha256(b"new").hexdigest()})
    arriving.remove()
    assert (tmp_path / "run" / "model" / "a").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_a_sweep_on_two_nodes_of_which_one_is_lost(tiny: Tiny, text: Path, tmp_path: Path) -> None:
    words = _words(tiny("llama"), text)
    recipes = load_recipes(RECIPES)
    names = [recipe.name for recipe in recipes.values()]
    sweep(recipes, tmp_path / "here", words)
    with nodes(2) as cluster, remote.nodes("auto", tmp_path / "notes.json") as found:
        assert found.count == 2
        lost = threading.Event()

        def kill(line: str) -> None:
            # A run of several blocks is half done.
            if "block 1 of" in line and not lost.is_set():
                lost.set()
                threading.Timer(1.0, cluster.kill).start()

        there = sweep(recipes, tmp_path / "there", words, say=kill, launch=found.launch, at_once=found.count)
    assert lost.is_set() and not any(row.failed for row in there.rows)
    assert _untimed(tmp_path / "there", names) == _untimed(tmp_path / "here", names)
    notes = json.loads((tmp_path / "notes.json").read_text())["runs"]
    ends = {one["run"]: one["code"] for one in notes}
    assert ends == dict.fromkeys(names, 0) and len(notes) > len(names), notes
    for node in {one["node"] for one in notes if "node" in one}:
        spans = sorted((one["began"], one["ended"]) for one in notes if one.get("node") == node)
        assert all(first[1] <= second[0] for first, second in pairwise(spans)), spans
    assert len({one["node"] for one in notes if "node" in one}) >= 2


@pytest.mark.slow
def test_a_plan_whose_candidates_are_compressed_on_nodes(tiny: Tiny, text: Path, tmp_path: Path) -> None:
    from compress import Recipe
    from compress.best.budgets import Budgets
    from compress.best.question import Question
    from compress.best.start import make_plan
    from compress.context import RunContext

    small: dict[str, Any] = {"samples": 4, "seq_len": 64, "eval_tokens": 1024, "new_tokens": 8, "threads": 1}
    model, calib = str(tiny("llama")), str(text)
    context = RunContext.of(Recipe.load("int8-dynamic"), model=model, out=tmp_path / "plan", calib=calib, **small)
    with nodes(2), remote.nodes("auto", tmp_path / "notes.json") as found:
        folder = make_plan(Question(context, Budgets(kl=0.3), wanted=2), False, found)
    plan = json.loads((folder / "plan.json").read_text())
    # The winner was made once more here, and the planner itself compares the bytes of its weights.
    assert (folder / "best" / "report.json").is_file() and plan["winner"]
    notes = json.loads((tmp_path / "notes.json").read_text())["runs"]
    assert {one["run"] for one in notes} == {one["key"] for one in plan["candidates"]} and notes
    assert all(one["code"] == 0 for one in notes)
