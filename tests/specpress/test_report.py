"""`specpress report`: plain text through a pipe, JSON, the browser, and what is no run."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_prints_plain_text_through_a_pipe(run_folder: Path, specpress: Callable[..., Any]) -> None:
    for name in (run_folder, run_folder / "model"):
        done = specpress("report", name)
        assert done.returncode == 0 and not done.stderr
        assert done.stdout.startswith("size: 28.3 MB -> ")
        assert done.stdout.endswith((run_folder / "report.md").read_text())
        assert "\x1b" not in done.stdout


@pytest.mark.parametrize("words", [["report", "RUN"], ["push", "RUN", "someone/pair", "--dry-run"]], ids=lambda w: w[0])
def test_nothing_slow_is_imported(run_folder: Path, words: list[str]) -> None:
    """torch takes seconds, and all that is needed lies in small files."""
    code = f"""
import sys
sys.argv[1:] = {[str(run_folder) if word == "RUN" else word for word in words]}
from specpress.cli import main
try:
    main()
finally:
    print([name for name in ("torch", "transformers", "numpy") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "int4-rtn" in done.stdout
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_prints_json(run_folder: Path, specpress: Callable[..., Any]) -> None:
    done = specpress("report", run_folder, "--json")
    assert json.loads(done.stdout) == json.loads((run_folder / "report.json").read_text())


def test_draws_tables_in_a_terminal(run_folder: Path) -> None:
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "specpress", "report", str(run_folder)],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(writer)
    shown = b""
    try:
        while part := os.read(reader, 65536):
            shown += part
    except OSError:  # the end of a terminal that nobody holds any more
        pass
    assert process.wait(60) == 0
    assert b"\x1b[" in shown and b"bits per quantised weight" in shown


def test_opens_the_browser(run_folder: Path, tmp_path: Path, specpress: Callable[..., Any]) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    done = specpress("report", run_folder, "--open", env={**os.environ, "BROWSER": f"{browser} %s"})
    assert done.returncode == 0, done.stderr
    assert opened.read_text().strip() == (run_folder / "report.html").resolve().as_uri()


def test_mistakes_are_one_sentence(tmp_path: Path, specpress: Callable[..., Any]) -> None:
    for name in (tmp_path, tmp_path / "nothing"):
        done = specpress("report", name)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ") and "expected a run folder" in done.stderr
