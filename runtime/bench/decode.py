"""A shape with random weights on a GPU: steps at each width, and one layer's attention over long caches.

Both say how near they come to the memory's speed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, median_high

import torch

from runtime.bench.device_models import random_model
from runtime.bench.forwards import begun
from runtime.bench.measure import Bench, Place, Row, Sample, read_bytes, row
from runtime.bench.shapes import SHAPES
from runtime.contract import CacheKind, GreedyChains, Rows
from runtime.engine.deferred import require_finite
from runtime.kv_store import KEY_BLOCK, Store, allocate
from runtime.model.layers import described
from runtime.model.load import Model
from runtime.model.on_device import ARGMAX, DeviceRounds
from runtime.sampling.distribution import argmax_tokens

BASE = "bf16"
# Tokens of the chain that a decoder continues by itself in one call.
_CHAIN = 16
# Bits of a key or value, and of the scales of a token and head (one for its key, one for its value).
_BITS = {"float32": (32, 0), "float16": (16, 0), "int8": (8, 64), "int4": (4, 64), "int3": (3, 64)}


def computed_bytes(kind: str, kv_heads: int, head_dim: int, tokens: int) -> int:
    """Bytes of one layer's keys and values of so many tokens: codes and scales."""
    bits, scales = _BITS[kind]
    return tokens * kv_heads * (2 * head_dim * bits + scales) // 8


def time_kinds(
    bench: Bench, shape: str, kinds: Sequence[CacheKind], context: int, batch: int, widths: Sequence[int]
) -> None:
    """Rows: one layer's attention of `width` rows of each of `batch` requests over `context` tokens of random keys.

    bytes_computed is what keys and values take by their bits, bytes_held what the store takes; the times of a whole
    forward are a row's times the layers. computed_ms is bytes_computed over the copies' median speed.
    """
    from runtime.kernels.triton.attention_decode import Heads, Places, attend
    from runtime.kernels.triton.attention_splits import splits_for

    place = bench.place
    place.require_triton("attention")
    a = SHAPES[shape].architecture
    heads = Heads(a.heads, a.kv_heads, a.head_dim, a.head_dim**-0.5)
    blocks = -(-(context + max(widths)) // KEY_BLOCK)
    table = torch.arange(batch * blocks, dtype=torch.int32, device=place.device).view(batch, blocks)
    tasks: dict[tuple[str, int], Callable[[], float]] = {}
    held: dict[str, int] = {}
    for kind in kinds:
        store = _filled(allocate(kind, 1, batch * blocks, a.kv_heads, a.head_dim, place.device), place.device)
        held[kind] = sum(part.nbytes for part in store.parts)
        for width in widths:
            rows = torch.arange(batch * width, dtype=torch.int32, device=place.device)
            request, step = rows // width, rows % width
            places = Places(table, request, context + step, torch.full_like(rows, context))
            q = torch.randn(batch * width, a.heads, a.head_dim, device=place.device)
            run = partial(attend, q, store, 0, kind, heads, places, splits_for(context + width), sharing=width)
            try:
                run()
                tasks[kind, width] = place.task(place.repeated(run))
            except Exception as error:  # the compiler's own classes, memory, …: the other kinds go on
                bench.leave_out(error, cache=kind, width=width)
    samples = bench.samples(tasks)
    speed = median_high(bench.bandwidth.readings)
    for (name, width), taken in samples.items():
        read = computed_bytes(name, a.kv_heads, a.head_dim, batch * (context + width))
        about = {"shape": shape, "layers": a.layers, "batch": batch, "context": context}
        memory = {"bytes_computed": read, "bytes_held": held[name], "computed_ms": read / speed * 1e3}
        base = samples.get((name, 1))
        bench.rows.append(row("attention", name, width, taken, read, base, **about, **memory))


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


@dataclass(frozen=True)
class Steps:
    """Steps to be timed: of so many rows each, after `context` tokens in a cache of this kind."""

    widths: Sequence[int]
    context: int
    cache: CacheKind = "float32"


def time_shape(bench: Bench, shape: str, schemes: Sequence[str], asked: Steps) -> list[Row]:
    """Rows for every scheme of a shape.

    A step is a forward of `width` rows after the context and the choice of a token after each, on the host. Where
    there is room the bf16 model stays beside each other one and is timed in the same rounds.
    """
    found: list[Row] = []
    base: Model | None = None
    base_samples: list[Sample] | None = None
    for scheme in sorted(schemes, key=lambda name: name != BASE):
        bench.say(f"{shape}, {scheme}")
        for attempt in range(2):
            try:
                rows, samples = _time(bench, shape, scheme, base, asked)
                break
            except Exception as error:  # memory, mostly; a kernel that this GPU refuses must not end the others
                rows = []
                if base is None or attempt:
                    bench.leave_out(error, shape=shape, scheme=scheme)
                    break
            # Beside the bf16 model there was no room: without it there may be, at another minute's speed.
            base = None
            bench.place.release()
        together = base is not None or scheme == BASE
        if scheme == BASE and rows:
            base_samples = samples
            base = _model(bench, shape, BASE) if len(schemes) > 1 else None
        for one in rows:
            one |= {"shape": shape, "over_bf16": None, "bf16_in_same_rounds": together}
            compared = samples if base is not None and scheme != BASE else base_samples
            if compared and one["what"] == "decode" and one["width"] == 1:
                one["over_bf16"] = median(s.seconds for s in compared) * 1e3 / one["ms_median"]
        found += rows
        bench.place.release()
    return found


def _model(bench: Bench, shape: str, scheme: str) -> Model:
    return random_model(shape, scheme, bench.place.device, bench.kernels, "keep" if scheme == BASE else "int8")


def _time(bench: Bench, shape: str, scheme: str, base: Model | None, asked: Steps) -> tuple[list[Row], list[Sample]]:
    """The scheme's rows; and bf16's samples of width 1 in these rounds (its own, where it is the scheme)."""
    place = bench.place
    if place.is_gpu:
        torch.cuda.reset_peak_memory_stats(place.device)
    model = _model(bench, shape, scheme)
    made, longest = steps(place, model, asked)
    tasks: dict[tuple[str, int], Callable[[], float]] = {("decode", width): step for width, step in made.items()}
    if longest is not None:
        tasks["greedy chain", 1] = longest
    if base is not None:
        tasks[BASE, 1] = steps(place, base, replace(asked, widths=(1,)))[0][1]
    samples = bench.samples(tasks)
    cache = model.decoder.new_cache(asked.cache).bytes_per_token() * asked.context
    read = read_bytes(model.decoder) + cache
    first = samples.get(("decode", 1))
    peak = torch.cuda.max_memory_allocated(place.device) if place.is_gpu else None
    about = {"kernels": described(model.decoder), "exact": model.decoder.exact, "peak_bytes": peak}
    about |= {"bytes_read": read, "kv_bytes_read": cache, "cache": asked.cache}
    rows = [
        row(what, scheme, width, taken, read, first if what == "decode" else None, **about)
        for (what, width), taken in samples.items()
        if what != BASE
    ]
    return rows, samples.get((BASE, 1), first or [])


def steps(
    place: Place, model: Model, asked: Steps
) -> tuple[dict[int, Callable[[], float]], Callable[[], float] | None]:
    """By width, the task of one step after the context; and that of a greedy chain, over its tokens.

    The chain is one call for many tokens (contract.GreedyChains), where the decoder has it; else None.
    """
    decoder, context, widths = model.decoder, asked.context, asked.widths
    longest = max(*widths, _CHAIN)
    cache, request, ids = begun(decoder, context, longest, context + max(widths), kind=asked.cache)

    def back() -> None:
        cache.truncate(request, context)

    def step(width: int) -> Callable[[], float]:
        rows = Rows.chains([(request, context, width)])

        def run() -> None:
            logits = decoder.forward(ids[:width], rows, cache).logits
            if isinstance(decoder, DeviceRounds):
                require_finite(decoder.next_tokens(logits, [ARGMAX] * width)[0])
            else:
                argmax_tokens(logits, "timed model")

        return place.task(run, back)

    made = {width: step(width) for width in widths}
    if not isinstance(decoder, GreedyChains):
        return made, None
    rows = Rows.chains([(request, context, 1)])
    return made, place.task(
        lambda: decoder.continue_greedy(ids[:1], rows, cache, [_CHAIN], decoder.vocab_size), back, calls=_CHAIN
    )
