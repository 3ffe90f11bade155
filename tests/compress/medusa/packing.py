"""How the models that heads are trained for are packed, and windows of text for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Tiny = Callable[..., Path]
UNTIED = {"tie_word_embeddings": False}
PACKING: dict[str, Any] = {"seq_len": 64, "draft": "none", "report": lambda *_: {}}


def windows(n: int, length: int = 24, seed: int = 0) -> torch.Tensor:
    """Of few different tokens, so that held-out texts are something like those to learn from."""
    return torch.randint(1, 12, (n, length), generator=torch.Generator().manual_seed(seed))


def silent(done: int, total: int) -> None:
    pass
