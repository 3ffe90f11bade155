import errno
import os

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


@pytest.mark.parametrize("error", [ValueError("ours"), RuntimeError("ours"), BrokenPipeError(), typer.Exit(1)])
def test_everything_else_passes(error: Exception) -> None:
    with pytest.raises(type(error)) as found, without_traceback():
        raise error
    assert found.value is error
