"""Runs that end early: what they leave behind, and how they go on."""

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from compress.artifact import manifest
from compress.errors import UserError
from tests.compress.pipeline.small_runs import StopAt, Tiny, refusal


def test_resume_goes_on_after_the_committed_blocks(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    model = tiny("mistral")
    go(model, out=tmp_path / "straight")
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="power"):
        go(model, progress=StopAt("quantize", 3, RuntimeError("power cut")))
    partial = tmp_path / "out.partial"
    parts = sorted(partial.glob("part-*.safetensors"))
    assert len(parts) == 3 and not out.exists()
    times = [path.stat().st_mtime_ns for path in parts]
    with pytest.raises(UserError, match=r"out\.partial holds a run that was cut short.*--resume.*--force"):
        go(model)
    with pytest.raises(UserError, match="seed was 0 and is 9"):
        go(model, resume=True, seed=9)
    with pytest.raises(UserError, match=r"recipe.*scheme was 'nf4' and is 'int4'"):
        go(model, "int4-rtn", resume=True)
    # A second cut, now in the report: the journalled blocks are not made again.
    with pytest.raises(RuntimeError):
        go(model, resume=True, failure=RuntimeError("again"))
    assert [path.stat().st_mtime_ns for path in parts] == times
    artifact, facts = go(model, resume=True)
    assert not partial.exists()
    assert len(facts.layers) == 14
    assert (out / manifest.NAME).read_bytes() == (tmp_path / "straight" / manifest.NAME).read_bytes()
    left = ["SERVE.md", "manifest.json", "model", "recipe.yaml", "serve"]
    assert sorted(path.name for path in artifact.path.iterdir()) == left


STOPS = [
    (KeyboardInterrupt("now"), KeyboardInterrupt, "now"),
    (OSError(errno.ENOSPC, "No space left on device"), UserError, "no space left on the device"),
    (PermissionError(errno.EACCES, "Permission denied", "x"), UserError, "no permission"),
]


@pytest.mark.parametrize(
    ("failure", "raised", "sentence"), [*STOPS, (UserError("the text is too short"), UserError, "too short")]
)
def test_nothing_is_left_of_no_work(
    tiny: Tiny, go: Any, tmp_path: Path, failure: BaseException, raised: type[BaseException], sentence: str
) -> None:
    with pytest.raises(raised, match=sentence):
        go(tiny("llama"), out=tmp_path / "deep" / "run", progress=StopAt("quantize", 0, failure))
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_leaves_nothing_of_rounding(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    failure = UserError("the text is too short")
    for trouble in ({"progress": StopAt("quantize", 4, failure)}, {"failure": failure}):
        with pytest.raises(UserError, match="too short"):
            go(tiny("llama"), out=tmp_path / "deep" / "run", **trouble)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("failure", "raised", "sentence"), STOPS)
def test_what_is_done_is_kept_and_said_so(
    tiny: Tiny, go: Any, tmp_path: Path, failure: BaseException, raised: type[BaseException], sentence: str
) -> None:
    go(tiny("llama"), out=tmp_path / "straight")
    for number, trouble in enumerate(({"progress": StopAt("quantize", 3, failure)}, {"failure": failure})):
        out = tmp_path / f"run{number}"
        with pytest.raises(raised, match=sentence) as caught:
            go(tiny("llama"), out=out, **trouble)
        said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert f"run{number}.partial is kept for --resume" in said
        go(tiny("llama"), out=out, resume=True)
        assert (out / manifest.NAME).read_bytes() == (tmp_path / "straight" / manifest.NAME).read_bytes()


def test_ctrl_c_keeps_what_was_resumed(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        go(tiny("llama"), progress=StopAt("quantize", 2, RuntimeError()))
    with pytest.raises(KeyboardInterrupt):
        go(tiny("llama"), progress=StopAt("quantize", 3, KeyboardInterrupt()), resume=True)
    artifact, _ = go(tiny("llama"), resume=True)
    artifact.verify()


def test_output_that_is_not_empty(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    go(tiny("llama"))
    before = (out / manifest.NAME).read_bytes()
    assert "--force" in refusal(tmp_path, lambda: go(tiny("llama"), "int4-rtn"))
    # A run that fails leaves the old one as it was.
    with pytest.raises(KeyboardInterrupt):
        go(tiny("llama"), "int4-rtn", force=True, failure=KeyboardInterrupt())
    assert (out / manifest.NAME).read_bytes() == before
    go(tiny("llama"), "int4-rtn", force=True)
    assert manifest.read(out)["recipe"] == "int4-rtn"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_force_deletes_only_runs(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    go(tiny("llama"))  # an empty folder is fine
    shutil.rmtree(out)
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    assert "not written by a run" in refusal(tmp_path, lambda: go(tiny("llama"), force=True))
    shutil.rmtree(out)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "notes").write_text("mine")
    assert "in the way" in refusal(tmp_path, lambda: go(tiny("llama"), force=True))
    shutil.rmtree(tmp_path / "out.partial")
    out.write_text("a file")
    assert "found a file" in refusal(tmp_path, lambda: go(tiny("llama"), force=True))


def test_resume_needs_something_to_resume(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    assert "found none" in refusal(tmp_path, lambda: go(tiny("llama"), resume=True))


def test_force_starts_a_cut_run_again(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        go(tiny("llama"), progress=StopAt("quantize", 2, RuntimeError()))
    artifact, _ = go(tiny("llama"), "int4-rtn", force=True)
    assert artifact.manifest["recipe"] == "int4-rtn"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
