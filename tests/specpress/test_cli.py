"""The front door: help without imports, versions, completion of three shells, and what it forwards to."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from specpress.cli import COMMANDS, app, load_command
from tests import warm

# What no help may need: each takes a second or more.
HEAVY = ("torch", "transformers", "numpy", "rich", "huggingface_hub", "matplotlib")


def test_help_names_every_command(specpress: Callable[..., Any]) -> None:
    done = specpress("--help")
    assert done.returncode == 0 and not done.stderr
    for name, entry in COMMANDS.items():
        assert name in done.stdout and entry.about in " ".join(done.stdout.split())


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_imports_nothing_heavy(name: str) -> None:
    code = f"""
import sys
sys.argv[1:] = {[*name.split(), "--help"]}
from specpress.cli import main
try:
    main()
finally:
    print([module for module in {HEAVY} if module in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"Usage: specpress {name}".rstrip())
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "--target", "nowhere", "--prompt", "x"),
        ("chat", "nowhere"),
        ("serve", "--target", "nowhere"),
        ("compress", "--recipe", "nf4", "--model", "nowhere"),
        ("best", "--model", "nowhere", "--kl", "0.1"),
        ("export", "nowhere", "--to", "gguf"),
        ("check", "nowhere"),
    ],
    ids=lambda words: words[0],
)
def test_a_mistyped_path_is_told_at_once(words: tuple[str, ...]) -> None:
    code = f"""
import sys
sys.argv = ["specpress", *{words!r}]
from specpress.cli import main
try:
    main()
finally:
    print([name for name in ("torch", "transformers", "fastapi") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: nowhere: no such directory"), done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_is_quick(specpress: Callable[..., Any]) -> None:
    """Three times a bare Python's start and some 0.1 s; 0.4 s on a quiet machine."""

    def shortest(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return min(times)

    bare = shortest(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True))
    assert shortest(lambda: specpress("--help")) < 0.3 + 5 * bare


def test_no_arguments_show_the_help(specpress: Callable[..., Any]) -> None:
    assert "Commands:" in specpress().stdout + specpress().stderr


def test_an_unknown_command_is_refused(specpress: Callable[..., Any]) -> None:
    done = specpress("compres", "--recipe", "nf4")
    assert done.returncode == 2 and "compress" in done.stderr and "Traceback" not in done.stderr


def test_version(specpress: Callable[..., Any]) -> None:
    lines = specpress("--version").stdout.splitlines()
    found = dict(line.split(maxsplit=1) for line in lines)
    assert found["specpress"] == metadata.version("specpress") and found["torch"] == metadata.version("torch")


def test_forwards_options(specpress: Callable[..., Any]) -> None:
    assert "int4-gptq" in specpress("compress", "--list").stdout
    assert "Usage: specpress bench speculate" in specpress("bench", "speculate", "--help").stdout
    assert "Usage: specpress bench gpu decode" in specpress("bench", "gpu", "decode", "--help").stdout


def test_writes_prompts(specpress: Callable[..., Any], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A paragraph that goes on for quite a while, so that half of it is a prompt of some words. " * 4)
    done = specpress("prompts", tmp_path / "out.jsonl", "--source", text, "--count", "1")
    assert done.returncode == 0 and '"prompt"' in (tmp_path / "out.jsonl").read_text()
    assert specpress("prompts", tmp_path / "o", "--source", tmp_path / "missing.txt").returncode == 2


def test_commands_have_options() -> None:
    group = get_command(app)
    assert set(group.commands) == set(COMMANDS)  # type: ignore[attr-defined]
    for name in COMMANDS:
        command = load_command(name)
        assert command.params or command.commands


COMPLETIONS = {
    "bash": ({"COMP_CWORD": "{last}", "COMP_WORDS": "{words}"}, "complete_bash"),
    "zsh": ({"_TYPER_COMPLETE_ARGS": "{words}"}, "complete_zsh"),
    "fish": ({"_TYPER_COMPLETE_ARGS": "{words}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}, "complete_fish"),
}


@pytest.mark.parametrize("shell", COMPLETIONS)
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("specpress ge", {"generate"}),
        ("specpress generate --tar", {"--target"}),
        ("specpress bench spec", {"speculate"}),
        ("specpress re", {"report"}),
        ("specpress report --js", {"--json"}),
    ],
)
def test_completes(shell: str, words: str, found: set[str]) -> None:
    settings, kind = COMPLETIONS[shell]
    asked = {key: value.format(words=words, last=len(words.split()) - 1) for key, value in settings.items()}
    done = warm.run("specpress", env={**os.environ, **asked, "_SPECPRESS_COMPLETE": kind})
    assert all(name in done.stdout for name in found), done
    assert "bench" not in done.stdout.split()


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_shows_the_completion_script(shell: str) -> None:
    asked = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = warm.run("specpress", "--show-completion", shell, env={**os.environ, **asked})
    assert "_SPECPRESS_COMPLETE" in done.stdout and f"complete_{shell}" in done.stdout, done


def test_python_names() -> None:
    import compress
    import runtime
    import specpress

    for name in specpress.__all__:
        assert getattr(specpress, name) is getattr(compress if hasattr(compress, name) else runtime, name)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = specpress.missing  # type: ignore[attr-defined]
