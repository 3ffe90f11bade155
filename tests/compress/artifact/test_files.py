"""Files that are whole or as they were, whatever lies where they are made."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.artifact.files import whole
from runtime.bench.output import write_text


def by_whole(path: Path) -> None:
    with whole(path) as file:
        file.write(b"new")


WRITERS: dict[str, Callable[[Path], None]] = {
    "{}.tmp": by_whole,
    ".{}.partial": lambda path: write_text(path, "new", "--json"),
}


@pytest.mark.parametrize("beside", WRITERS)
@pytest.mark.parametrize("there", ["nothing", "a pipe", "what a stopped run left"])
def test_what_lies_beside_is_replaced(tmp_path: Path, beside: str, there: str) -> None:
    out = tmp_path / "report.json"
    out.write_bytes(b"old")
    if there == "a pipe":
        os.mkfifo(tmp_path / beside.format(out.name))
    elif there == "what a stopped run left":
        (tmp_path / beside.format(out.name)).write_bytes(b"half of a longer text")
    WRITERS[beside](out)
    assert out.read_bytes() == b"new" and [file.name for file in tmp_path.iterdir()] == [out.name]


def test_an_error_leaves_what_was(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    out.write_bytes(b"old")
    with pytest.raises(OSError, match="full") as found, whole(out) as file:
        file.write(b"half")
        raise OSError(28, "disk full")
    assert found.value.filename == str(out)
    assert out.read_bytes() == b"old" and [one.name for one in tmp_path.iterdir()] == [out.name]
