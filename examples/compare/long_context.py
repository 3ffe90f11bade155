"""What a long text costs a decoding step: by how keys and values are kept, and by threads.

    .venv/bin/python examples/compare/long_context.py

Random weights and random keys, so speed only. Attention is what a step after the whole context takes beyond one after
the first 64 tokens. All steps take turns, and each line is a median over the rounds.
"""

from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.bench.options import at_least_one, numbers, writable
from runtime.cli import without_traceback
from runtime.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runtime.bench.measure import Row, Sample
    from runtime.contract import CacheKind, Decoder

    # A cache's kind, the rows of a step, threads, and tokens before it.
    Task = tuple[CacheKind, int, int, int]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_SHORT = 64
_KINDS: "tuple[CacheKind, ...]" = ("float32", "int8", "int4")
_COLUMNS = (
    *(("cache", "cache", "s"), ("width", "rows", "d"), ("threads", "threads", "d"), ("step_ms", "step ms", ".2f")),
    *(("attention_ms", "attention ms", ".2f"), ("over_float32", "float32's / its", ".2f")),
    *(
        ("over_one_thread", "1 thread's / its", ".2f"),
        ("cache_mb", "cache MB", ".1f"),
        ("computed_mb", "computed", ".1f"),
    ),
)


@app.command()
def main(
    shape: Annotated[str, typer.Option(help="A published model's sizes.")] = "qwen2.5-0.5b",
    context: Annotated[int, typer.Option(help="Tokens in the cache before each step.", min=_SHORT + 1)] = 16_384,
    widths: Annotated[str, typer.Option(help="Rows of one step, comma-separated.")] = "1,5",
    threads: Annotated[str, typer.Option(help="Threads, comma-separated; 1 is what others are held against.")] = "1,2",
    kernels: Annotated[str, typer.Option(help="auto, or one of the native paths.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds that count.")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Times decoding steps after a long text with each kind of cache."""
    with without_traceback():
        at_least_one({"--rounds": rounds})
        rows, counts = numbers("--widths", widths, 16), numbers("--threads", threads, 1024)
        writable("--json", json_file)
        # Imported here: torch takes longer to load than `--help` may take.
        from runtime.bench.measure import interleaved, machine
        from runtime.bench.output import console, table, write
        from runtime.bench.random_models import write_shape
        from runtime.bench.shapes import SHAPES
        from runtime.model.load import load

        if shape not in SHAPES:
            raise UserError(f"--shape: expected one of {', '.join(SHAPES)}, found {shape!r}")
        most = SHAPES[shape].architecture.max_positions
        if context + max(rows) > most:
            raise UserError(f"--context: {shape} has {most} positions, {context} and {max(rows)} rows are more")
        with TemporaryDirectory(prefix="specpress-long-") as folder:
            path = write_shape(shape, "int4", Path(folder) / "model")
            decoders = {count: load(path, threads=count, kernels=kernels).decoder for count in counts}
        steps: dict[Task, Callable[[], float]] = {}
        sizes = {}
        for kind in _KINDS:
            made, sizes[kind] = _steps(decoders, kind, context, rows)
            steps |= made
        found = _rows(interleaved(steps, rounds, lambda: None), sizes, context)
        out = console(120)
        out.print(
            f"{shape}, int4, random weights and keys (speed only); {machine()['cpu']}, {decoders[counts[0]].kernels};"
            f" after {context} tokens; {rounds} interleaved rounds\n",
            soft_wrap=True,
        )
        out.print(table(_COLUMNS, found))
        if json_file is not None:
            write(json_file, {"shape": shape, "machine": machine(), "context": context, "rows": found})


def _steps(
    decoders: "Mapping[int, Decoder]", kind: "CacheKind", context: int, widths: "Sequence[int]"
) -> "tuple[dict[Task, Callable[[], float]], tuple[float, float]]":
    """The steps of one kind of cache, which all decoders share; and its megabytes, held and computed.

    Each runs once untimed before it is timed: another kind's step has left other things in the processor's caches, and
    threads asleep.
    """
    import torch

    from runtime.bench.decode import computed_bytes
    from runtime.bench.measure import CPU
    from runtime.cache.contiguous import KeyValueCache
    from runtime.contract import Rows, integers

    cache = next(iter(decoders.values())).new_cache(kind)
    assert isinstance(cache, KeyValueCache)
    form, draws, requests = cache.format, torch.Generator().manual_seed(0), {}
    for tokens in (_SHORT, context):
        requests[tokens] = request = cache.open(tokens + max(widths))
        start = cache.reserve(request, tokens)
        for layer in range(form.layers):
            cache.write(layer, request, start, *torch.randn(2, tokens, form.kv_heads, form.head_dim, generator=draws))
    steps: dict[Task, Callable[[], float]] = {}
    for width, (threads, decoder), (after, request) in product(widths, decoders.items(), requests.items()):
        ids, rows = integers([5 + i for i in range(width)]), Rows.chains([(request, after, width)])
        undone = partial(cache.truncate, request, after)
        call = partial(decoder.forward, ids, rows, cache)
        steps[kind, width, threads, after] = CPU.task(call, before=partial(_all, undone, call, undone))
    held = sum(part.numel() * part.element_size() for part in cache.store(request).parts)
    computed = form.layers * computed_bytes(kind, form.kv_heads, form.head_dim, context + max(widths))
    return steps, (held / 1e6, computed / 1e6)


def _all(*calls: "Callable[[], object]") -> None:
    for call in calls:
        call()


def _rows(
    samples: "Mapping[Task, Sequence[Sample]]", sizes: "Mapping[CacheKind, tuple[float, float]]", context: int
) -> "list[Row]":
    """A row for each kind, width and number of threads."""
    ms = {task: median(sample.seconds for sample in taken) * 1e3 for task, taken in samples.items()}
    spent = {task[:3]: ms[task] - ms[*task[:3], _SHORT] for task in ms if task[3] == context}
    return [
        {
            **{"cache": kind, "width": width, "threads": threads, "step_ms": ms[kind, width, threads, context]},
            **{"attention_ms": taken, "over_float32": _over(spent["float32", width, threads], taken)},
            "over_one_thread": _over(spent[kind, width, 1], taken) if (kind, width, 1) in spent else None,
            **dict(zip(("cache_mb", "computed_mb"), sizes[kind], strict=True)),
        }
        for (kind, width, threads), taken in spent.items()
    ]


def _over(base: float, taken: float) -> float | None:
    """None where a step after a long context took no longer than one after a short one: nothing was measured."""
    return base / taken if min(base, taken) > 0 else None


if __name__ == "__main__":
    app()
