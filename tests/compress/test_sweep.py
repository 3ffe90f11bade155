"""Many recipes in one go: real runs of a tiny model, failures, and going on after an interruption."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compress.errors import UserError
from compress.processes import Ended, Say, launch
from compress.recipe import Recipe
from compress.sweep import app, check_words, load_recipes, sweep

Tiny = Callable[..., Path]
REPOSITORY = Path(__file__).parents[2]
EXAMPLE = Path(__file__).parent.joinpath("report", "report_example.json")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "code.txt"
    path.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))
    return path


def small(model: Path, text: Path) -> list[str]:
    return [
        *("--model", str(model), "--calib", str(text), "--seq-len", "32", "--eval-tokens", "64"),
        *("--samples", "2", "--new-tokens", "4", "--no-speed"),
    ]


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text("about: Matches nothing.\nextends: nf4\nstages: [{quantize: {scheme: nf4, targets: [nothing]}}]\n")
    return path


@pytest.mark.slow
def test_the_whole_command(tiny: Tiny, text: Path, bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good recipe, one that fails, one that is killed; then the command again, without what cannot succeed."""
    monkeypatch.chdir(REPOSITORY)  # what the runs' processes import
    out = tmp_path / "out"
    words = ["--recipes", f"nf4,{bad},int8-dynamic", "--out", str(out), *small(tiny("llama"), text)]
    with monkeypatch.context() as patch:
        patch.setattr("compress.sweep.sweep.__kwdefaults__", sweep.__kwdefaults__ | {"launch": _killing("int8")})
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    table = json.loads((out / "sweep.json").read_text())
    assert [row["recipe"] for row in table["rows"]] == ["nf4", "bad", "int8-dynamic"]
    good, failed, killed = table["rows"]
    assert good["failed"] is None and good["compressed_bytes"] > 0 and good["speed"] is None
    assert failed["failed"].startswith("recipe pattern 'nothing' matches no linear layer")
    assert killed["failed"] == "ended by signal 9: see int8-dynamic.log"
    assert (out / "int8-dynamic.partial" / "journal.json").is_file()
    before = (out / "nf4" / "manifest.json").stat().st_mtime_ns
    for name in ("sweep.json", "sweep.md", "sweep.html"):
        assert str(tmp_path) not in (out / name).read_text()
    assert "failed" in result.stdout and "nf4: started" in result.stderr and "Working on weights: done" in result.stderr

    words[1] = "nf4,int8-dynamic"
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "nf4: done before" in result.stderr and "int8-dynamic: resumed" in result.stderr
    assert (out / "nf4" / "manifest.json").stat().st_mtime_ns == before
    rows = json.loads((out / "sweep.json").read_text())["rows"]
    assert rows[1]["failed"] is None and rows[1]["kl_divergence"] < rows[0]["kl_divergence"]
    assert "Measuring quality" in (out / "int8-dynamic.log").read_text()
    names = {path.name for path in out.iterdir()}
    logs = {"nf4.log", "bad.log", "int8-dynamic.log"}
    tables = {"sweep.json", "sweep.md", "sweep.html", "pareto.svg", "pareto.png"}
    assert names == {"nf4", "int8-dynamic"} | logs | tables


def _killing(name: str) -> Callable[[Sequence[str], Path, Say], Ended]:
    """Starts runs as ever, but kills the one whose recipe's name begins so when its weights are written."""

    def start(command: Sequence[str], log: Path, say: Say) -> Ended:
        if not log.name.startswith(name):
            return launch(command, log, say)
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("Reading it back"):
                process.kill()
        return Ended(process.wait(), "Reading it back …")

    return start


class Runs:
    """Stands in for processes: leaves the example's report, or fails as told."""

    def __init__(self, **endings: Ended):
        self.endings, self.commands = endings, list[list[str]]()

    def __call__(self, command: Sequence[str], log: Path, say: Say) -> Ended:
        self.commands.append(list(command))
        out = Path(command[command.index("--out") + 1])
        ended = self.endings.get(out.name.replace("-", "_"), Ended(0, ""))
        if ended.code == 0:
            report = json.loads(EXAMPLE.read_text(encoding="utf-8"))
            report["asked"]["recipe"] = Recipe.load(command[command.index("--recipe") + 1]).to_dict()
            out.mkdir(exist_ok=True)
            (out / "report.json").write_text(json.dumps(report))
        return ended

    @property
    def names(self) -> list[tuple[str, tuple[str, ...]]]:
        """Recipe, and the options that only some runs get."""
        special = ("--force", "--resume")
        return [(c[c.index("--recipe") + 1], tuple(word for word in c if word in special)) for c in self.commands]


def go(out: Path, runs: Runs, names: str = "nf4,int4-rtn", words: Sequence[str] = (), force: bool = False) -> Any:
    return sweep(load_recipes(names), out, words, force, launch=runs)


def test_what_is_finished_is_not_done_again(tmp_path: Path) -> None:
    first = Runs(int4_rtn=Ended(2, "error: /data/model/config.json: no such file"))
    found = go(tmp_path / "out", first)
    assert first.names == [("nf4", ()), ("int4-rtn", ())]
    assert [row.failed for row in found.rows] == [None, "config.json: no such file"]
    second = Runs()
    found = go(tmp_path / "out", second, "int8-dynamic,int4-rtn,nf4")
    assert second.names == [("int8-dynamic", ()), ("int4-rtn", ())]
    assert [row.recipe for row in found.rows] == ["int8-dynamic", "int4-rtn", "nf4"]
    assert not any(row.failed for row in found.rows)
    assert first.commands[0][:4] == [sys.executable, "-m", "compress.run", "--recipe"]


def test_options_go_to_every_run(tmp_path: Path) -> None:
    runs = Runs()
    go(tmp_path / "out", runs, words=["--samples", "4", "--no-speed"])
    assert all(command[-3:] == ["--samples", "4", "--no-speed"] for command in runs.commands)


def test_a_partial_folder_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "out" / "int4-rtn.partial").mkdir(parents=True)
    runs = Runs()
    go(tmp_path / "out", runs)
    assert runs.names == [("nf4", ()), ("int4-rtn", ("--resume",))]


def test_other_options_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    go(out, Runs(), words=["--samples", "4"])
    with pytest.raises(UserError, match=r"options '--samples 4', found '--samples 8': take the same"):
        go(out, Runs(), words=["--samples", "8"])
    runs = Runs()
    go(out, runs, words=["--samples", "8"], force=True)
    assert runs.names == [("nf4", ("--force",)), ("int4-rtn", ("--force",))]
    runs = Runs()
    go(out, runs, words=["--samples", "8"])
    assert runs.names == []


def test_force_that_was_cut_short_goes_on_with_force(tmp_path: Path) -> None:
    """What --force had not come to is still of the old options: it must not count as done."""
    out = tmp_path / "out"
    go(out, Runs(), words=["--samples", "4"])
    with pytest.raises(KeyboardInterrupt):
        go(out, Runs(int4_rtn=Ended(130, "error: stopped by Ctrl-C")), words=["--samples", "8"], force=True)
    runs = Runs()
    go(out, runs, words=["--samples", "8"])
    assert runs.names == [("int4-rtn", ("--force",))]


def test_a_changed_recipe_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("extends: int4-rtn\n")
    go(tmp_path / "out", Runs(), str(own))
    own.write_text("extends: int4-rtn\nabout: said better\n")
    go(tmp_path / "out", Runs(), str(own))
    own.write_text("extends: int4-rtn\nstages: [{quantize: {scheme: int4, group_size: 32}}]\n")
    with pytest.raises(UserError, match="another version of the recipe own"):
        go(tmp_path / "out", Runs(), str(own))


def test_a_run_folder_of_somebody_else_s(tmp_path: Path) -> None:
    out = tmp_path / "out"
    go(out, Runs(), "nf4")
    (out / "sweep.json").write_text("{")
    with pytest.raises(UserError, match=r"sweep\.json cannot be read"):
        go(out, Runs(), "nf4")
    (out / "sweep.json").unlink()
    with pytest.raises(UserError, match="nf4 was not made by a sweep"):
        go(out, Runs(), "nf4")
    shutil.rmtree(out / "nf4")
    assert go(out, Runs(), "nf4").rows[0].failed is None


def test_a_traceback_is_in_the_log(tmp_path: Path) -> None:
    code = "import sys; print('seen', file=sys.stderr, flush=True); print('shown', flush=True); 1 / 0"
    lines: list[str] = []
    ended = launch([sys.executable, "-c", code], tmp_path / "a.log", lines.append)
    assert ended == Ended(1, "ZeroDivisionError: division by zero") and lines[0] == "seen"
    log = (tmp_path / "a.log").read_text()
    assert "seen" in log and "shown" in log and "Traceback" in log
    found = go(tmp_path / "out", Runs(nf4=ended), "nf4")
    assert found.rows[0].failed == "exit code 1: see nf4.log"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--recipes", "nf4,nf5", "--out", "x"], "recipe 'nf5' is unknown"),
        (["--recipes", " , ", "--out", "x"], "--recipes: expected names"),
        (["--recipes", "nf4", "--out", "x", "--sample", "3"], "--sample: expected an option of"),
        (["--recipes", "nf4", "--out", "x", "--resume"], "--resume: a sweep gives this option"),
        (["--recipes", "nf4", "--out", "x", "--list"], "--list: a sweep gives"),
        (["--recipes", "nf4,int4-rtn", "--out", "x", "--seed", "-1"], "--seed: expected a whole number from 0"),
        (["--recipes", "nf4", "--out", "/"], "--out: / is the root of all files"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and sentence in result.stderr and "Traceback" not in result.output
    assert len(result.stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == []


def test_words_that_are_no_options_are_refused_before_the_first_run(tmp_path: Path) -> None:
    for words in (["positional"], ["--samples"], ["--samples", "many"]):
        result = CliRunner().invoke(app, ["--recipes", "nf4", "--out", str(tmp_path / "x"), *words])
        assert result.exit_code == 2 and "Usage: " in result.stderr and list(tmp_path.iterdir()) == []


def test_options_that_some_recipe_takes_pass() -> None:
    chosen = load_recipes("nf4,int4-qat")
    check_words(["--minutes", "5"], chosen.values())
    with pytest.raises(UserError, match="no stage that trains"):
        check_words(["--minutes", "5"], [chosen["nf4"]])


def test_two_recipes_of_one_name(tmp_path: Path) -> None:
    own = tmp_path / "nf4.yaml"
    own.write_text("extends: nf4\n")
    with pytest.raises(UserError, match="both called 'nf4'"):
        load_recipes(f"nf4,{own}")
    assert [recipe.name for recipe in load_recipes("all").values()] == sorted(load_recipes("all"))


def test_options_of_runs_are_known() -> None:
    check_words(["--samples", "4", "--model=org/name", "--no-speed", "--seed", "-1"])


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from compress.sweep import app; "
        "assert 'Usage' in CliRunner().invoke(app, ['--help']).output; "
        "print(sorted({'torch', 'transformers', 'pydantic', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_example_has_defaults() -> None:
    """It is the command itself, on the embedded pair; its own options win."""
    example = REPOSITORY / "examples" / "compare" / "quality_vs_speed.py"
    words = [sys.executable, str(example), "--recipes", "nf5"]
    done = subprocess.run(words, cwd=REPOSITORY, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True)
    assert done.returncode == 2 and "recipe 'nf5' is unknown" in done.stderr
