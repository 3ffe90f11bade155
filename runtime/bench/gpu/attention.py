"""Attention over long caches: time and memory of each kind of cache, beside what is computed for them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from runtime.bench.gpu.output import reason
from runtime.bench.gpu.place import Copies, Place
from runtime.bench.rounds import interleaved, row
from runtime.errors import UserError
from runtime.kernels.reference import KEY_BLOCK
from runtime.kv import Store, allocate
from runtime.kv_kind import CacheKind
from runtime.shapes import SHAPES

# Bits of a key or value, and of the scales of a token and head (one for its key, one for its value).
_BITS = {"float32": (32, 0), "float16": (16, 0), "int8": (8, 64), "int4": (4, 64)}


def computed_bytes(kind: str, kv_heads: int, head_dim: int, tokens: int) -> int:
    """Bytes of one layer's keys and values of so many tokens: codes and scales."""
    bits, scales = _BITS[kind]
    return tokens * kv_heads * (2 * head_dim * bits + scales) // 8


def time_kinds(
    place: Place, shape: str, kinds: Sequence[CacheKind], context: int, batch: int, widths: Sequence[int], rounds: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[float]]:
    """One layer's attention of `width` rows of each of `batch` requests over `context` tokens of random keys.

    bytes_computed is what keys and values take by their bits, bytes_held what the store takes; the times of a whole
    forward are a row's times the layers. computed_ms is bytes_computed over the copies' median speed.
    """
    from runtime.kernels.triton.attention import Heads, Places, attend, splits_for
    from runtime.kernels.triton.available import usable

    can, why = usable(str(place.device))
    if not can:
        raise UserError(f"gpu attention measures Triton's kernels, which cannot run here: {why}")
    a = SHAPES[shape].architecture
    heads = Heads(a.heads, a.kv_heads, a.head_dim, a.head_dim**-0.5)
    blocks = -(-(context + max(widths)) // KEY_BLOCK)
    table = torch.arange(batch * blocks, dtype=torch.int32, device=place.device).view(batch, blocks)
    copies = Copies(place)
    tasks: dict[tuple[str, int], Callable[[], float]] = {}
    held: dict[str, int] = {}
    left_out: list[dict[str, Any]] = []
    for kind in kinds:
        store = _filled(allocate(kind, 1, batch * blocks, a.kv_heads, a.head_dim, place.device), place.device)
        held[kind] = sum(part.nbytes for part in (store.keys, store.values, store.key_scale, store.value_scale))
        for width in widths:
            rows = torch.arange(batch * width, dtype=torch.int32, device=place.device)
            request, step = rows // width, rows % width
            places = Places(table, request, context + step, torch.full_like(rows, context))
            q = torch.randn(batch * width, a.heads, a.head_dim, device=place.device)
            splits = splits_for(context + width)

            def run(
                q: torch.Tensor = q,
                store: Store = store,
                kind: CacheKind = kind,
                places: Places = places,
                splits: int = splits,
                width: int = width,
            ) -> None:
                attend(q, store, 0, kind, heads, places, splits, sharing=width)

            try:
                run()
                tasks[kind, width] = place.task(place.repeated(run))
            except Exception as error:  # the compiler's own classes, memory, …: the other kinds go on
                left_out.append({"cache": kind, "width": width, "why": reason(error)})
    samples = interleaved(tasks, rounds, copies)
    speed = sorted(copies.readings)[len(copies.readings) // 2]
    found = []
    for (name, width), taken in samples.items():
        read = computed_bytes(name, a.kv_heads, a.head_dim, batch * (context + width))
        timed = asdict(row("attention", name, width, taken, read, samples.get((name, 1))))
        about = {"shape": shape, "layers": a.layers, "batch": batch, "context": context}
        memory = {"bytes_computed": read, "bytes_held": held[name], "computed_ms": read / speed * 1e3}
        found.append(timed | about | memory)
    return found, left_out, copies.readings


def _filled(store: Store, device: torch.device) -> Store:
    """Random contents: codes of all values, scales about 1."""
    draws = torch.Generator(device).manual_seed(0)
    for part in (store.keys, store.values):
        if part.dtype.is_floating_point:
            part.normal_(generator=draws)
        else:
            low, high = (-127, 128) if part.dtype == torch.int8 else (0, 256)
            # Only ±7 are codes of int4, which a byte of 0 would be outside of; for time it is all the same.
            part.random_(low, high, generator=draws)
    for scale in (store.key_scale, store.value_scale):
        scale.uniform_(0.005, 0.015, generator=draws)
    return store
