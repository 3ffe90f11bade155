"""The command: what it prints, what it exits with, what it leaves."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compress.context import RunContext
from compress.recipe import Recipe, built_in
from compress.report.schema import Report
from compress.run import app, command_line, summary_rows
from runtime.generate import app as generate
from tests.killing import hear_interrupts

Tiny = Callable[..., Path]
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "gpt2")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "code.txt"
    path.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))
    return path


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the command in this process, in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def small(model: Path, text: Path) -> list[str]:
    return [
        *("--model", str(model), "--calib", str(text), "--seq-len", "32", "--eval-tokens", "64"),
        *("--samples", "2", "--new-tokens", "4", "--no-speed"),
    ]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_whole_command(tiny: Tiny, command: Any, text: Path, kind: str) -> None:
    result = command("--recipe", "nf4", *small(tiny(kind), text))
    assert result.exit_code == 0, result.output
    run = Path("runs/nf4")
    names = {path.name for path in run.iterdir()}
    reports = {"report.json", "report.md", "report.html", "SERVE.md", "serve"}
    assert names == {"model", "recipe.yaml", "manifest.json", *reports}
    report = json.loads((run / "report.json").read_text())
    on_disk = sum(path.stat().st_size for path in (run / "model").glob("*.safetensors"))
    assert report["size"]["compressed_bytes"] == on_disk
    assert report["model"] == kind and report["draft"] is None
    assert report["left_alone"]
    assert "bits per quantised weight" in result.stdout
    assert "Report: runs/nf4/report.html" in result.stdout
    assert "Working on weights: done" in result.stderr and "Measuring quality: done" in result.stderr
    for name in ("report.json", "report.md", "report.html", "manifest.json", "recipe.yaml", "SERVE.md"):
        assert str(text.parent) not in (run / name).read_text()


def test_a_draft_and_speed(tiny: Tiny, command: Any, text: Path) -> None:
    words = [word for word in small(tiny("mistral"), text) if word != "--no-speed"]
    result = command("--recipe", "int4-rtn", "--draft", tiny("llama"), "--out", "deep/out", *words)
    assert result.exit_code == 0, result.output
    report = json.loads(Path("deep/out/report.json").read_text())
    assert report["draft"] == "llama" and Path("deep/out/draft/model.safetensors").is_file()
    speed = report["speed"]
    assert speed["pairings"][0]["drafter"] == speed["drafter"] and len(speed["pairings"]) == 7
    assert speed["speculative"]["tokens_per_second"] == speed["pairings"][0]["tokens_per_second"] > 0
    assert report["lossless"]["mismatches"] == 0
    assert all(row["drafter"] in result.stdout for row in speed["pairings"]) and "over plain" in result.stdout


def test_one_drafter_with_one_draft_length_on_prompts_of_ones_own(
    tiny: Tiny, command: Any, text: Path, tmp_path: Path
) -> None:
    entries = [{"turns": [f"double_{n}(value)"], "category": ("math_reasoning", "rag")[n % 2]} for n in range(12)]
    (tmp_path / "spec.jsonl").write_text("\n".join(map(json.dumps, entries)))
    words = [word for word in small(tiny("llama"), text) if word != "--no-speed"]
    asked = ("--drafter", "lookup", "--draft-length", 2, "--prompts", tmp_path / "spec.jsonl", "--baselines", "none")
    result = command("--recipe", "int4-rtn", *words, *asked)
    assert result.exit_code == 0, result.output
    report = json.loads(Path("runs/int4-rtn/report.json").read_text())
    speed = report["speed"]
    assert {row["drafter"] for row in speed["pairings"]} == {"none", "lookup"} and speed["fastest_drafter"] == "lookup"
    assert speed["draft_length"] == 2 == report["asked"]["draft_length"] and report["asked"]["drafter"] == "lookup"
    assert [(group["name"], group["prompts"]) for group in speed["groups"]] == [("math_reasoning", 4), ("rag", 4)]
    assert speed["baselines"] == [] and "--prompts spec.jsonl" in report["asked"]["command"]
    # Whoever takes the run takes who was fastest.
    shown = CliRunner().invoke(generate, ["--target", "runs/int4-rtn", "--prompt", "def", "--max-new-tokens", "3"])
    why = "no drafter was faster" if speed["drafter"] == "none" else "fastest"
    assert f"{speed['drafter']} ({why} when measured" in shown.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--drafter", "model"], "--drafter model needs a draft: name one with --draft"),
        (["--drafter", "lookup+medusa"], "--drafter lookup+medusa needs a recipe with a medusa stage"),
        (["--drafter", "nested"], "--drafter nested needs a recipe with int8 weights"),
        (["--drafter", "mtp"], "--drafter mtp needs a checkpoint that brings a layer for multi-token prediction"),
        (["--drafter", "eagle3"], "--drafter: expected one of none, model, tree,"),
        (["--drafter", "guess"], "--drafter: expected one of none, model, tree,"),
        (
            ["--drafter", "lokup"],
            "--drafter: expected one of none, model, tree, lookup, suffix, nested, medusa, block,",
        ),
        (["--prompts", "no.jsonl"], "--prompts: no.jsonl cannot be read"),
    ],
)
def test_what_speed_cannot_be_measured_with_is_told_before_the_work(
    tiny: Tiny, command: Any, text: Path, words: list[str], sentence: str
) -> None:
    given = [word for word in small(tiny("llama"), text) if word != "--no-speed"]
    result = command("--recipe", "nf4", *given, *words)
    assert result.exit_code == 2 and f"error: {sentence}" in result.stderr and "Traceback" not in result.output
    assert "Working on weights" not in result.stderr and list(Path().iterdir()) == []


def test_int8_dynamic(tiny: Tiny, command: Any, text: Path) -> None:
    result = command("--recipe", "int8-dynamic", *small(tiny("llama"), text))
    assert result.exit_code == 0, result.output
    quality = json.loads(Path("runs/int8-dynamic/report.json").read_text())["quality"]
    assert quality["perplexity"]["compressed"] == pytest.approx(quality["perplexity"]["original"], rel=0.02)


@pytest.mark.parametrize("loads", [False, True])
def test_no_quality_is_measured_where_none_is_asked_for(
    tiny: Tiny, command: Any, text: Path, monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    """Without speed either, the models are not even loaded: they may be larger than memory."""
    from compress.report import assemble

    loaded: list[Any] = []
    load = assemble.load
    monkeypatch.setattr(assemble, "load", lambda *given, **options: loaded.append(given) or load(*given, **options))
    words = [word for word in small(tiny("llama"), text) if not (loads and word == "--no-speed")]
    words[words.index("--eval-tokens") + 1] = "0"
    result = command("--recipe", "int4-rtn", "--memory-budget", "3GB", "--baselines", "none", *words)
    assert result.exit_code == 0, result.output
    assert "forecast: " in result.stderr and "not measured" in result.stdout
    report = json.loads(Path("runs/int4-rtn/report.json").read_text())
    assert report["quality"]["perplexity"] == {"original": None, "compressed": None, "ci95": None}
    assert report["quality"]["protocol"]["tokens"] == 0 and len(report["quality"]["layers"]) == 14
    assert "--eval-tokens 0" in report["not_measured"]["quality.perplexity"]
    assert report["size"]["ratio"] > 1.5
    assert (report["sample"] is not None) == bool(loaded) == loads
    assert (report["speed"]["compressed"] is not None) == loads
    assert "--memory-budget 3000000000" in report["asked"]["command"]
    page = Path("runs/int4-rtn/report.html").read_text()
    assert "no evaluation tokens were asked for" in page
    assert ("The same prompt" in page) == loads


def test_list_has_a_line_for_each_recipe(command: Any) -> None:
    result = command("--list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [recipe.name for recipe in built_in()]
    # Names stand apart from what they are for.
    assert all("  " in line for line in lines)


def test_a_built_in_recipe_is_shown_as_a_file_to_start_from(command: Any, tmp_path: Path) -> None:
    shown = command("--show", "trellis-3")
    (tmp_path / "mine.yaml").write_text(shown.stdout)
    assert shown.exit_code == 0 and "# 3 bits a weight" in shown.stdout
    assert Recipe.load(tmp_path / "mine.yaml") == Recipe.load("trellis-3")
    refused = command("--show", "trelis-3")
    assert refused.exit_code == 2 and "did you mean trellis-3?" in refused.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from compress.run import app; "
        "assert 'Usage' in CliRunner().invoke(app, ['--help']).output; "
        "print(sorted({'torch', 'transformers', 'pydantic', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "int4-rtn, int8-dynamic, int8-medusa, int8-smoothquant, int8-static,"),
        (["--recipe", "nf5"], "did you mean nf4?"),
        (["--recipe", "no/such.yaml"], "expected a YAML file, found none"),
        (["--recipe", "nf4", "--memory-budget", "lots"], "--memory-budget: expected a size such as 4GB or 512MiB"),
        (["--recipe", "nf4", "--samples", "0"], "--samples: expected a whole number from 1"),
        (["--recipe", "nf4", "--draft-length", "1000"], "--draft-length: expected a whole number from 1 to 64"),
        (["--recipe", "nf4", "--device", "tpu"], "--device: expected cpu, cuda, cuda:N or auto"),
        (["--recipe", "nf4", "--model", "/no/such/folder"], "no such directory"),
        (["--recipe", "nf4", "--model", ""], "empty"),
    ],
)
def test_mistakes_are_one_sentence(command: Any, words: list[str], sentence: str) -> None:
    result = command(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and sentence in errors[0]
    assert "Traceback" not in result.output
    assert list(Path().iterdir()) == []


def test_no_place_to_write(tiny: Tiny, command: Any, text: Path) -> None:
    """/proc takes no folders, not even from root."""
    if not Path("/proc/self").exists():
        pytest.skip("needs Linux")
    result = command("--recipe", "nf4", "--out", "/proc/specpress", *small(tiny("llama"), text))
    assert result.exit_code == 2
    assert "error: /proc/specpress" in result.stderr and "Traceback" not in result.output


def test_a_disk_that_is_full(tiny: Tiny, command: Any, text: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands for the disk: the system's refusal takes the same way out."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        result = command("--recipe", "nf4", "--out", tmp_path / "out", *small(tiny("llama"), text))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code.txt", "here"]


def test_ctrl_c_ends_with_130(tiny: Tiny, text: Path, tmp_path: Path) -> None:
    words = ["--recipe", "nf4", "--out", str(tmp_path / "out"), *small(tiny("llama"), text)]
    process = subprocess.Popen(
        [sys.executable, "-m", "compress.run", *words],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("Reading it back"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "error: stopped by Ctrl-C" in errors and "Traceback" not in errors
    # The weights are done: hours of work, for all that Ctrl-C knows.
    assert "out.partial is kept for --resume" in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code.txt", "out.partial"]


def test_a_killed_run_goes_on(tiny: Tiny, text: Path, tmp_path: Path) -> None:
    """SIGKILL leaves the partial folder; --resume finishes it."""
    # As many threads in this process as in the one that is killed: --resume asks for that.
    words = ["--recipe", "nf4", "--out", str(tmp_path / "out"), "--threads", "1", *small(tiny("llama"), text)]
    start = [sys.executable, "-m", "compress.run", *words]
    process = subprocess.Popen(start, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("Reading it back"):
            break
    process.kill()
    process.communicate()
    assert (tmp_path / "out.partial" / "journal.json").is_file()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "--resume" in result.stderr
    result = CliRunner().invoke(app, [*words, "--resume"])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code.txt", "out"]


def test_the_command_line_is_reproducible_and_has_no_foreign_paths(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    nf4 = Recipe.load("nf4")
    context = RunContext.of(
        nf4, model="org/name", draft="/home/me/models/small draft", samples=8, speed=False, force=True
    )
    line = command_line(str(tmp_path / "own.yaml"), context)
    assert line == (
        "python -m compress.run --recipe own.yaml --model org/name --draft 'small draft' --samples 8 --no-speed"
    )
    assert command_line("nf4", RunContext.of(nf4)) == "python -m compress.run --recipe nf4"


def test_the_summary_says_what_was_not_measured() -> None:
    found = json.loads(Path(__file__).parent.joinpath("report", "report_example.json").read_text(encoding="utf-8"))
    found["size"] |= {"original_bytes": 4_000_000, "compressed_bytes": 1_000_000, "ratio": 4.0}
    found["quality"]["perplexity"] |= {"original": 20.0, "compressed": 20.5}
    found["speed"]["original"]["tokens_per_second"] = 10.0
    found["speed"] |= {"drafter": None, "compressed": None, "speculative": None, "acceptance_rate": None}
    missing = ("drafter", "compressed", "speculative", "acceptance_rate")
    found["not_measured"] |= {f"speed.{name}": "too few" for name in missing}
    report = Report.model_validate(found)
    rows = dict(summary_rows(report))
    assert rows["size"] == "4.0 MB -> 1.0 MB (4.00 x smaller)"
    assert rows["perplexity"] == "20.000 -> 20.500"
    assert rows["tokens/s: original / compressed / speculative"] == "10.0 / not measured / not measured"
    assert rows["acceptance rate α"] == "not measured" and "fastest way" not in rows
