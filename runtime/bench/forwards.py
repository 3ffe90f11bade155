"""Forwards of a whole model: decoding at each width, a long prompt, and verifying chains and trees of drafts."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from runtime.bench.measure import CPU, Row, interleaved, read_bytes, row
from runtime.contract import Cache, CacheKind, Decoder, Rows, integers
from runtime.model.base import BaseDecoder
from runtime.model.native import NativeDecoder

CONTEXT = 64
PREFILL = 512
Task = tuple[str, int]


def time_forwards(
    decoder: BaseDecoder,
    scheme: str,
    tasks: Sequence[Task],
    rounds: int,
    memory: Callable[[], float | None],
    draft: BaseDecoder | None = None,
    ids: Tensor | None = None,
) -> list[Row]:
    """Rows for tasks (what, width).

    "prefill" is a prompt of `width` tokens from an empty cache, logits of its last row. Everything else is `width`
    rows after `CONTEXT` tokens with the logits of each: a chain, or for "tree" a binary tree. The cache is rolled back
    before each forward, outside its time. over_width_1 compares with the chain of one row. `memory` measures the
    memory's speed. `draft` is another decoder: a row "draft" of width 1, of which over_width_1 is what a draft step
    costs in steps of the target. `ids` are the tokens of the context and of what is fed after it; None: random ones.
    """
    longest = max((width for what, width in tasks if what != "prefill"), default=1)
    step = _steps(decoder, longest, ids)
    steps = {task: step(*task) for task in tasks}
    if draft is not None:
        steps["draft", 1] = _steps(draft, longest)("draft", 1)
    read = {
        (what, width): _bytes_read(decoder, call) + _bytes_of_states(decoder, 1 if what == "prefill" else width)
        for (what, width), call in steps.items()
        if what != "draft"
    }
    if draft is not None:
        read["draft", 1] = read_bytes(draft) + _bytes_of_states(draft, 1)
    samples = interleaved(steps, rounds, memory)
    base = next((samples[task] for task in tasks if task[0] != "prefill" and task[1] == 1), None)
    return [
        row(what, scheme, width, taken, read[what, width], None if what == "prefill" else base)
        for (what, width), taken in samples.items()
    ]


def _bytes_read(decoder: BaseDecoder, step: Callable[[], float]) -> int:
    """Bytes of weights that a forward reads; of a mixture those of the experts that its rows went to."""
    if not isinstance(decoder, NativeDecoder):
        return read_bytes(decoder)
    before = decoder.experts_read
    step()
    return read_bytes(decoder, decoder.experts_read - before)


def _bytes_of_states(decoder: BaseDecoder, left: int) -> int:
    """Of layers that carry a state from row to row: what is read of it, and what rows write that leave `left` of it."""
    return 4 * decoder.architecture.cache_shape.state * (1 + left)


def begun(
    decoder: Decoder,
    context: int,
    longest: int,
    tokens: int,
    ids: Tensor | None = None,
    kind: CacheKind = "float32",
) -> tuple[Cache, int, Tensor]:
    """A cache, its request of `context` tokens with room for `longest` more, and `tokens` random tokens to feed."""
    cache = decoder.new_cache(kind)
    request = cache.open(context + longest)
    if ids is None:
        ids = torch.randint(0, decoder.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
    decoder.forward(ids[:context], Rows.chains([(request, 0, context)]), cache, integers([context - 1]))
    return cache, request, ids


def _steps(decoder: Decoder, longest: int, ids: Tensor | None = None) -> Callable[[str, int], Callable[[], float]]:
    """Makes the forward of a task: (what, width) to a call that gives its seconds."""
    cache, after, ids = begun(decoder, CONTEXT, longest, max(PREFILL, longest), ids)

    def step(what: str, width: int) -> Callable[[], float]:
        request, length = (cache.open(width), 0) if what == "prefill" else (after, CONTEXT)
        rows = tree(request, width) if what == "tree" else Rows.chains([(request, length, width)])
        at = integers([width - 1]) if what == "prefill" else None
        # Cut here: what runs before the forward counts as its time, with caches that the memory's test left cold.
        call = partial(decoder.forward, ids[:width], rows, cache, at)
        return CPU.task(call, before=partial(cache.truncate, request, length))

    return step


def tree(request: int, width: int) -> Rows:
    """`width` rows after `CONTEXT` tokens: a binary tree, filled level by level."""
    parents = [-1, *((i - 1) // 2 for i in range(1, width))]
    positions = [CONTEXT + (i + 1).bit_length() - 1 for i in range(width)]
    return Rows(integers([request] * width), integers(positions), integers(parents))
