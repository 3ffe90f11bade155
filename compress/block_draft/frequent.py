"""Which tokens a short head has rows for: those that the target's own text is made of, but for a small share."""

import torch
from torch import Tensor

from compress.recipe.block_draft import BlockDraft

# Vocabularies below this are read whole where the recipe does not say: their heads are a small part of a draft.
_LARGE = 16_384
# Rows of a head that kernels compute together.
_TOGETHER = 64


def covered(stage: BlockDraft, vocabulary: int) -> float:
    """The share of the text that a stage's short head covers; 1: its head is not short."""
    if stage.frequent is not None:
        return stage.frequent
    return 0.99 if vocabulary >= _LARGE else 1.0


def frequent_tokens(text: Tensor, vocabulary: int, share: float) -> Tensor | None:
    """(n,) int64 in order: the fewest tokens that are this share of a text, any shape, int64, rounded up to 64 rows.

    Of equally frequent ones the lower (FR-Spec, 2502.14856, counts a general text in place of the target's). None where
    these would be all, or `share` is 1.
    """
    if share >= 1:
        return None
    counts = torch.bincount(text.flatten(), minlength=vocabulary)
    order = counts.argsort(descending=True, stable=True)
    few = int((counts[order].cumsum(0) < share * counts.sum()).sum()) + 1
    count = -(-few // _TOGETHER) * _TOGETHER
    return order[:count].sort().values if count < vocabulary else None
