"""Tiny random models of any causal language model that transformers builds, with the shipped pair's tokenizer."""

import shutil
from pathlib import Path

import torch

from runtime.models.tiny import tiny_model

PAIR = Path(__file__).parents[2] / "examples" / "pair" / "target"


def make(model_type: str, out: Path) -> None:
    """Writes a random bfloat16 model of a `model_type`. Raises UserError where none can be built."""
    tiny_model(model_type).to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PAIR / name, out)
