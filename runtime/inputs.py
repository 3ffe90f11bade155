"""What our decoders ask of a forward's arguments before anything is changed."""

import torch
from torch import Tensor

from runtime.cache import KeyValueCache
from runtime.family import Architecture
from runtime.rows import Cache, Rows

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def checked_cache(
    tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None, architecture: Architecture
) -> KeyValueCache:
    """The cache, of the type that it must have. Where the rows stand in it is checked by layout.reserve.

    Raises TypeError for another kind of cache; ValueError for another model's, for tokens that are no integers (T,) in
    the vocabulary or not as many as the rows, and for `logits_at` that are no integers (n,) in 0..T − 1.
    """
    if not isinstance(cache, KeyValueCache):
        raise TypeError(f"this decoder needs the cache of its new_cache(), not {type(cache).__name__}")
    count, a = len(rows), architecture
    # numel, not len: torch's len is Python.
    if tokens.numel() != count:
        raise ValueError(f"{tokens.numel()} tokens for {count} rows")
    if (cache.layers, cache.kv_heads, cache.head_dim) != (a.layers, a.kv_heads, a.head_dim):
        raise ValueError(
            f"this cache is another model's: it has {cache.layers} layers of {cache.kv_heads} heads of"
            f" {cache.head_dim}, and this model {a.layers} of {a.kv_heads} of {a.head_dim}"
        )
    _require_range("token ids", "tokens", tokens, a.vocab)
    if logits_at is not None:
        _require_range("logits_at", "logits_at", logits_at, count)
    return cache


def _require_range(what: str, argument: str, values: Tensor, end: int) -> None:
    if values.ndim != 1 or values.dtype not in _INTEGERS:
        raise ValueError(f"{argument} must be integers (n,), found {values.dtype} {list(values.shape)}")
    # A list's extremes: for the few numbers of a decoding step several times quicker than numpy's or torch's.
    found = values.tolist()
    if found and (min(found) < 0 or max(found) >= end):
        raise ValueError(f"{what} must lie in 0..{end - 1}, found {min(found)}..{max(found)}")
