"""What a model takes of a device's memory, and what to say where it does not fit."""

from dataclasses import dataclass

import torch

from runtime.errors import UserError
from runtime.family import Architecture

# Rows of the widest forward that is captured. (Here, because the cache asks this file for room.)
WIDEST = 64
# Rows of a prompt in one forward (batching.PREFILL_ROWS, drafters.model.PREFILL_ROWS).
_PROMPT_ROWS = 512
# A text that there must be room for, where the model's positions go that far.
_TEXT = 4096
_FLOAT = 4


@dataclass(frozen=True)
class Need:
    """Bytes: of the weights as they are stored, of one text's float32 keys and values, and of what a forward holds."""

    weights: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.work


def needed(a: Architecture, weights: int) -> Need:
    """What a model of `weights` bytes needs beside them, for one text of 4096 tokens or as many as it has positions.

    work: a prompt's rows through a block, the logits of the widest forward that is captured, and the largest layer once
    more at 4 bytes a weight, which is what laying it out takes. The experts of one block are held twice while they are
    stacked: at most a block's share of the weights.
    """
    cache = min(a.max_positions, _TEXT) * a.layers * 2 * a.kv_heads * a.head_dim * _FLOAT
    row = 4 * a.hidden + (2 * a.heads + 2 * a.kv_heads) * a.head_dim + 3 * a.intermediate
    logits = 2 * WIDEST * a.vocab
    largest = a.hidden * max(a.vocab, 2 * a.intermediate)
    moved = 0 if a.experts is None else weights // a.layers
    return Need(weights, cache, _FLOAT * (_PROMPT_ROWS * row + logits + largest) + moved)


def free_bytes(device: torch.device) -> int:
    """Bytes of the device that this process can still take: what is free, and what torch holds and nobody uses."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def require_room(name: str, need: Need, free: int) -> None:
    """Raises UserError where a model does not fit `free` bytes."""
    if need.total > free:
        raise UserError(
            f"{name} needs about {_shown(need.total)} of the GPU ({_shown(need.weights)} of weights,"
            f" {_shown(need.cache)} for one text's keys and values, {_shown(need.work)} to work with), and"
            f" {_shown(free)} are free;"
            " compress it to a smaller scheme, free the GPU's memory, or load it with device='cpu'"
        )


def require_pages(pages: int, size: int, free: int) -> None:
    """Raises UserError where so many pages of `size` bytes do not fit `free` bytes."""
    if pages * size > free:
        raise UserError(
            f"a cache of {pages} pages needs {_shown(pages * size)} of the GPU, and {_shown(free)} are free; take at"
            f" most {free // size} pages, fewer or shorter texts, or another kind of cache (int8, int4)"
        )


def _shown(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
