"""Small runs of the pipeline, and what may go wrong with one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.context import RunContext
from compress.errors import USER_ERRORS
from compress.records import RunFacts

Tiny = Callable[..., Path]


class FakeReport:
    """Keeps the facts; the real report has tests of its own."""

    def __init__(self, failure: BaseException | None = None):
        self.failure = failure
        self.facts: RunFacts

    def __call__(self, facts: RunFacts, context: RunContext) -> dict[str, Any]:
        self.facts = facts
        if self.failure is not None:
            raise self.failure
        return {}


class StopAt:
    """Progress that raises when a stage reaches a number."""

    def __init__(self, stage: str, done: int, failure: BaseException):
        self.at, self.failure = (stage, done), failure

    def __call__(self, stage: str, done: int, total: int) -> None:
        if (stage, done) == self.at:
            raise self.failure


def recipe(folder: Path, **quantize: Any) -> Path:
    path = folder / "own.yaml"
    path.write_text(json.dumps({"stages": [{"quantize": quantize}]}))
    return path


def damaged(model: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a model with other tensors."""
    copy = folder / "damaged"
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def refusal(folder: Path, call: Callable[[], Any]) -> str:
    """The sentence of a user's mistake, which must leave nothing in `folder` that was not there."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(USER_ERRORS) as caught:
        call()
    assert sorted(folder.rglob("*")) == before
    return str(caught.value)
