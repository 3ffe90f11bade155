"""GGUF files of every family that llama.cpp has: read back, they compute what the model does."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.export import silent
from compress.export.gguf.file import write
from runtime import load
from runtime.checkpoints.gguf.names import ARCHITECTURES
from runtime.contract import Rows
from tests.compress.export import gguf_families

pytest.importorskip("gguf")

TOKENS = torch.randint(1, 8000, (37,), generator=torch.Generator().manual_seed(5))
_OLD = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma"}


def logits(path: Path) -> Tensor:
    decoder = load(path).decoder
    cache = decoder.new_cache()
    return decoder.forward(TOKENS, Rows.chains([(cache.open(len(TOKENS)), 0, len(TOKENS))]), cache).logits


def test_every_architecture_has_a_model_here() -> None:
    assert set(gguf_families.CHANGES) == set(ARCHITECTURES) - _OLD


@pytest.mark.parametrize("kind", gguf_families.CHANGES)
def test_a_file_computes_what_its_model_does(kind: str, tmp_path: Path) -> None:
    model = gguf_families.write(kind, tmp_path / kind)
    (tmp_path / "out").mkdir()
    result = write(model, tmp_path / "out", silent)
    assert result.losses == ()
    found, wanted = logits(tmp_path / "out" / "model.gguf"), logits(model)
    # Norms have gone through 1 + w in some, and constants through float32.
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
