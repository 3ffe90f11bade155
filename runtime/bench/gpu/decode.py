"""Decoding a shape with random weights at each width: what a step costs, and how near it comes to the memory."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from runtime.bench.gpu.models import random_model, read_bytes
from runtime.bench.gpu.output import reason
from runtime.bench.gpu.place import Copies, Place
from runtime.bench.rounds import Sample, interleaved, row
from runtime.device_rounds import ARGMAX, DeviceRounds
from runtime.kernels_used import described
from runtime.loading import Model
from runtime.rows import GreedyChains, Rows, integers
from runtime.sampling import finite_choices
from runtime.waiting import sound

BASE = "bf16"
# Tokens of the chain that a decoder continues by itself in one call.
_CHAIN = 16
Found = dict[str, Any]


def time_shape(
    place: Place,
    shape: str,
    schemes: Sequence[str],
    widths: Sequence[int],
    context: int,
    rounds: int,
    kernels: str,
    say: Callable[[str], None],
) -> tuple[list[Found], list[Found], list[float]]:
    """Rows for every scheme, what was left out and why, and the readings of the memory's speed.

    A step is a forward of `width` rows after `context` tokens and the choice of a token after each, on the host. Where
    there is room the bf16 model stays beside each other one and is timed in the same rounds.
    """
    found: list[Found] = []
    left_out: list[Found] = []
    copies = Copies(place)
    base: Model | None = None
    base_samples: list[Sample] | None = None
    for scheme in sorted(schemes, key=lambda name: name != BASE):
        say(f"{shape}, {scheme}")
        for attempt in range(2):
            try:
                rows, samples = _time(place, shape, scheme, base, widths, context, rounds, kernels, copies)
                break
            except Exception as error:  # memory, mostly; a kernel that this GPU refuses must not end the others
                rows = []
                if base is None or attempt:
                    left_out.append({"shape": shape, "scheme": scheme, "why": reason(error)})
                    break
            # Beside the bf16 model there was no room: without it there may be, at another minute's speed.
            base = None
            place.release()
        together = base is not None or scheme == BASE
        if scheme == BASE and rows:
            base_samples = samples
            base = _model(place, shape, BASE, kernels) if len(schemes) > 1 else None
        for one in rows:
            one |= {"shape": shape, "over_bf16": None, "bf16_in_same_rounds": together}
            compared = samples if base is not None and scheme != BASE else base_samples
            if compared and one["what"] == "decode" and one["width"] == 1:
                one["over_bf16"] = median(s.seconds for s in compared) * 1e3 / one["ms_median"]
        found += rows
        place.release()
    return found, left_out, copies.readings


def _model(place: Place, shape: str, scheme: str, kernels: str) -> Model:
    return random_model(shape, scheme, place.device, kernels, "keep" if scheme == BASE else "int8")


def _time(
    place: Place,
    shape: str,
    scheme: str,
    base: Model | None,
    widths: Sequence[int],
    context: int,
    rounds: int,
    kernels: str,
    copies: Copies,
) -> tuple[list[Found], list[Sample]]:
    """The scheme's rows; and bf16's samples of width 1 in these rounds (its own, where it is the scheme)."""
    place.forget_peak()
    model = _model(place, shape, scheme, kernels)
    made, longest = steps(place, model, widths, context)
    tasks: dict[tuple[str, int], Callable[[], float]] = {("decode", width): step for width, step in made.items()}
    if longest is not None:
        tasks["greedy chain", 1] = longest
    if base is not None:
        tasks[BASE, 1] = steps(place, base, (1,), context)[0][1]
    samples = interleaved(tasks, rounds, copies)
    cache = model.decoder.new_cache().bytes_per_token() * context
    read = read_bytes(model) + cache
    first = samples.get(("decode", 1))
    rows = [
        asdict(row(what, scheme, width, taken, read, first if what == "decode" else None))
        | {
            "bytes_read": read,
            "kv_bytes_read": cache,
            "kernels": described(model.decoder),
            "exact": model.decoder.exact,
            "peak_bytes": place.peak_bytes(),
        }
        for (what, width), taken in samples.items()
        if what != BASE
    ]
    return rows, samples.get((BASE, 1), first or [])


def steps(
    place: Place, model: Model, widths: Sequence[int], context: int
) -> tuple[dict[int, Callable[[], float]], Callable[[], float] | None]:
    """By width, the task of one step after `context` tokens; and that of a greedy chain, over its tokens.

    The chain is one call for many tokens (rows.GreedyChains), where the decoder has it; else None.
    """
    decoder = model.decoder
    cache = decoder.new_cache()
    request = cache.open(context + max(*widths, _CHAIN))
    ids = torch.randint(0, decoder.vocab_size, (context + max(widths),), generator=torch.Generator().manual_seed(0))
    last = integers([context - 1])
    decoder.forward(ids[:context], Rows.chains([(request, 0, context)]), cache, last)

    def back() -> None:
        cache.truncate(request, context)

    def step(width: int) -> Callable[[], float]:
        rows = Rows.chains([(request, context, width)])

        def run() -> None:
            logits = decoder.forward(ids[:width], rows, cache).logits
            if isinstance(decoder, DeviceRounds):
                sound(decoder.choices(logits, [ARGMAX] * width)[0])
            else:
                finite_choices(logits, "timed model")

        return place.task(run, back)

    made = {width: step(width) for width in widths}
    if not isinstance(decoder, GreedyChains):
        return made, None
    rows = Rows.chains([(request, context, 1)])
    chain = place.task(lambda: decoder.continue_greedy(ids[:1], rows, cache, [_CHAIN], decoder.vocab_size), back)
    return made, lambda: chain() / _CHAIN
