"""A GGUF file of a rotated model says so, and whoever reads it here knows."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.check.check import Text, check
from compress.export import silent
from compress.export.gguf.file import write
from compress.pipeline import compress
from compress.recipe import Recipe
from compress.rotate.unfold import unfold
from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.rotation import GGUF_KEY, rotation_of, said_in
from runtime.errors import UserError

gguf = pytest.importorskip("gguf")

Tiny = Callable[..., Path]


def splitting(source: Path, out: Path) -> Path:
    """The model with a tokenizer that splits text like GPT-2's, which llama.cpp has a name for."""
    shutil.copytree(source, out)
    content = json.loads((out / "tokenizer.json").read_text())
    content["pre_tokenizer"]["use_regex"] = True
    (out / "tokenizer.json").write_text(json.dumps(content))
    return out


def exported(model: Path, out: Path) -> Path:
    out.mkdir()
    write(model, out, silent)
    return out / "model.gguf"


@pytest.mark.parametrize("rotate", [{}, {"residual": False}])
def test_the_record_goes_into_the_file_and_comes_back(rotate: dict[str, Any], tiny: Tiny, tmp_path: Path) -> None:
    original = splitting(tiny("llama"), tmp_path / "original")
    recipe = Recipe.model_validate({"name": "own", "stages": [{"rotate": rotate}]})
    options: dict[str, Any] = {"samples": 1, "seq_len": 32, "seed": 2**62 + 1, "report": lambda *_: None}
    model = compress(original, recipe, tmp_path / "run", **options).model
    file = exported(model, tmp_path / "out")
    record = rotation_of(open_checkpoint(model).config)
    assert record is not None and record.seed == 2**62 + 1 and record.untied == bool(record.residual)
    assert rotation_of(open_checkpoint(file).config) == record
    # The file is compared with its original turned alike; unfolding it would want the norms as they were.
    result = check(file, original, Text(tokens=32))
    told = " | ".join(finding.sentence for finding in result.findings)
    assert result.level == "good" and "after the same rotation" in told, told
    with pytest.raises(Exception, match="unfold the run"):
        unfold(file, tmp_path / "plain", 1 << 30)
    assert rotation_of(open_checkpoint(exported(original, tmp_path / "plain")).config) is None


def test_metadata_that_say_it_wrongly_are_refused_by_the_files_name() -> None:
    right = {
        GGUF_KEY.format(name): value for name, value in zip(("residual", "values", "seed"), (64, 16, 7), strict=True)
    }
    assert said_in({**right, GGUF_KEY.format("untied"): True}, "m.gguf")["specpress"]["rotation"]["seed"] == 7
    assert said_in({"general.name": "x"}, "m.gguf") == {}
    for wrong in (right, {**right, GGUF_KEY.format("untied"): 1}, {GGUF_KEY.format("values"): "all"}):
        with pytest.raises(UserError, match=r"m\.gguf: specpress\.rotation must have residual"):
            said_in(wrong, "m.gguf")
