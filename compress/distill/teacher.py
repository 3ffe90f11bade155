"""Where a teacher's logits come from: a transformers model or a runtime decoder (a compressed target)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compress.errors import UserError
from runtime.contract import Decoder, Rows

Teacher = Callable[[Tensor], Tensor]
"""Tokens (B, T) int64 → logits (B, T, V) of what follows each, without a graph."""


def of_model(model: Any) -> Teacher:
    """A transformers causal language model, in its own dtype; its parameters are frozen."""
    model.eval().requires_grad_(False)

    @torch.no_grad()
    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens, use_cache=False).logits
        return found

    return logits


def of_decoder(decoder: Decoder) -> Teacher:
    """A model as `runtime.load` gives it: what it will answer when it is served, packed weights and kernels included.

    Its logits are float32. Raises UserError, when called, for windows beyond the decoder's positions.
    """

    def logits(tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        if length > decoder.max_positions:
            raise UserError(
                f"training.length: expected at most the teacher's {decoder.max_positions} positions, found {length}: "
                "ask for shorter windows"
            )
        cache = decoder.new_cache()
        handles = [cache.open(length) for _ in range(rows)]
        try:
            flat = tokens.flatten().to(decoder.device)
            # A training loop's autocast is for the student.
            with torch.autocast(decoder.device.type, enabled=False):
                out = decoder.forward(flat, Rows.chains([(handle, 0, length) for handle in handles]), cache)
        finally:
            for handle in handles:
                cache.close(handle)
        return out.logits.view(rows, length, -1).to(tokens.device)

    return logits


def narrowed(logits: Tensor, width: int) -> Tensor:
    """The first `width` logits of the last dimension: vocabularies are padded to different sizes.

    Raises ValueError for fewer than `width`.
    """
    if logits.shape[-1] < width:
        raise ValueError(f"expected at least {width} logits, found {logits.shape[-1]}")
    return logits[..., :width]
