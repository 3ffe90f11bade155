import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from calib.errors import UserError as CalibError
from compress.errors import USER_ERRORS
from runtime.cli import without_traceback
from runtime.errors import UserError


def ended(error: BaseException, capsys: pytest.CaptureFixture[str], *arguments: tuple[type[Exception], ...]) -> str:
    """What a command that raises `error` prints, with its exit code in front."""
    with pytest.raises(typer.Exit) as exit_, without_traceback(*arguments):
        raise error
    return f"{exit_.value.exit_code} {capsys.readouterr().err}"


def noted(error: BaseException) -> BaseException:
    error.add_note("the work is kept")
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("one\n  line"), "2 error: one line\n"),
        (noted(UserError("wrong")), "2 error: wrong; the work is kept\n"),
        (noted(KeyboardInterrupt()), "130 error: stopped by Ctrl-C; the work is kept\n"),
        (
            OSError(errno.EACCES, os.strerror(errno.EACCES), "a.json"),
            "2 error: a.json cannot be used (Permission denied): check it and its permissions\n",
        ),
        (OSError("no space"), "2 error: a file cannot be used (no space): check it and its permissions\n"),
    ],
)
def test_what_a_user_can_act_on_is_a_sentence(
    error: BaseException, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(error, capsys) == told


def test_memory_that_ran_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        assert "out of memory" in ended(error, capsys)
    assert "out of memory" in ended(MemoryError(), capsys)
    assert "the GPU is out of memory" in ended(torch.OutOfMemoryError("Tried to allocate 2 GiB"), capsys)


def test_a_floor_names_its_own_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(CalibError("text"), capsys, USER_ERRORS) == "2 error: text\n"
    with pytest.raises(CalibError), without_traceback():
        raise CalibError("text")


def test_what_to_do_after_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), without_traceback(stopped="go on"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "error: stopped by Ctrl-C; go on\n"


def test_ctrl_c_waits_for_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "takes_long.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.2)\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    # As in a terminal: a shell's background jobs ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(typer.Exit) as exit_, without_traceback():
            import takes_long

            assert takes_long.whole
            time.sleep(30)
        assert exit_.value.exit_code == 130 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_a_library_makes_of_ctrl_c_is_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    """As safetensors does, which then says that a tensor has no shape; a later error is one again."""

    def read() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        except KeyboardInterrupt:
            raise UserError("the tensor cannot be read") from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(typer.Exit) as exit_, without_traceback(stopped="go on"):
            read()
        assert exit_.value.exit_code == 130
        with pytest.raises(typer.Exit) as exit_, without_traceback():
            with contextlib.suppress(UserError):
                read()
            time.sleep(1.1)
            raise UserError("another one")
        assert exit_.value.exit_code == 2
        assert capsys.readouterr().err == "error: stopped by Ctrl-C; go on\nerror: another one\n"
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with without_traceback():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [ValueError("ours"), TypeError("ours"), RuntimeError("ours"), typer.Exit(1)])
def test_everything_else_passes(error: Exception) -> None:
    with pytest.raises(type(error)) as found, without_traceback():
        raise error
    assert found.value is error


def test_names_and_texts_that_no_file_can_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    cases: dict[str, Callable[[], object]] = {
        "no such user": lambda: Path("~no-such-user-here/x").expanduser(),
        "a NUL": lambda: open("a\0b"),  # noqa: SIM115, PTH123 (it does not open)
        "half a character": lambda: os.stat("\ud800"),  # noqa: PTH116 (Path refuses it in its own words)
        "no name of its own": lambda: Path("/").with_name("x"),
        "round in a loop": lambda: loop.resolve(),
        "digits": lambda: json.loads("1" * 5000),
        "nested too deeply": lambda: json.loads("[" * 100_000),
    }
    for told, call in cases.items():
        with pytest.raises(typer.Exit) as ended_, without_traceback():
            call()
        assert ended_.value.exit_code == 2
        assert told in capsys.readouterr().err


COMMAND = """
import sys, typer
from runtime.cli import without_traceback
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
@app.command()
def main(count: int):
    with without_traceback():
        for number in range(count):
            print("caf\u00e9", number)
app()
"""


def run(count: int, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", COMMAND, str(count)], stderr=subprocess.PIPE, timeout=60, **options)


def test_tokenizers_that_refuse_a_text_or_break_off(capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    wordless = Tokenizer(models.WordLevel({"a": 0}, unk_token="none"))
    endless = Tokenizer(models.BPE({"a": 0}, []))
    endless.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")  # type: ignore[assignment]
    for tokenizer, text in ((wordless, "b"), (endless, "a" * 40 + "b")):
        with pytest.raises(typer.Exit) as ended_, without_traceback():
            tokenizer.encode(text)
        assert ended_.value.exit_code == 2
        assert "error: the model's tokenizer.json does not fit together" in capsys.readouterr().err


def test_output_that_cannot_be_written() -> None:
    assert run(5, stdout=subprocess.PIPE).stdout.count(b"caf\xc3\xa9") == 5
    latin = run(5, stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert latin.returncode == 0
    assert latin.stdout.count(b"caf?") == 5
    # More than a pipe or a buffer holds, and so little that it is only written at the end.
    for count in (1, 100_000):
        with Path("/dev/full").open("wb") as full:
            found = run(count, stdout=full)
        assert found.returncode == 2
        assert found.stderr.decode() == (
            "error: a file cannot be used (No space left on device): check it and its permissions\n"
        )
        read, write = os.pipe()
        os.close(read)
        found = run(count, stdout=write)
        os.close(write)
        assert (found.returncode, found.stderr) == (0, b"")
        found = run(count, preexec_fn=lambda: os.close(1))
        assert (found.returncode, found.stderr) == (0, b"")
