"""The commands `kernels`, `decode`, `verify`, `speculate`, `load` and `digest` of `python -m runtime.bench`.

The first three time layers and forwards of real architectures with random weights: they are for speed only. The next
two run whole texts through the engine, with and without speculation. The last one times nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import typer

from runtime.bench.options import (
    WIDEST,
    DecodeOptions,
    DigestOptions,
    LayerOptions,
    LoadOptions,
    SpeculateOptions,
    VerifyOptions,
    at_least_one,
    numbers,
    writable,
)
from runtime.cli import takes
from runtime.errors import UserError

if TYPE_CHECKING:
    from runtime.bench.measure import Bandwidth, Row
    from runtime.kernels.dispatch import Kernel

    Measure = Callable[["Plan", str, Bandwidth], list[Row]]

# An int8 model loaded with planes: beside the target its draft is timed, which reads the upper ones alone.
_NESTED, _STORED = "nested", {"nested": "int8"}


@dataclass(frozen=True)
class Plan:
    """What to measure, checked: `command` is kernels, decode or verify."""

    command: str
    options: LayerOptions
    schemes: tuple[str, ...]
    widths: tuple[int, ...]
    kernel: "Kernel"
    threads: int


@takes(LayerOptions)
def kernels(options: LayerOptions) -> None:
    """Times each linear layer alone, and all of a forward's together, on weights that no cache holds."""
    from runtime.bench import layers

    def measure(plan: Plan, scheme: str, memory: "Bandwidth") -> "list[Row]":
        return layers.time_layers(options.shape, scheme, options.head, plan.kernel, plan.widths, options.rounds, memory)

    _run(_plan("kernels", options), measure)


@takes(DecodeOptions)
def decode(options: DecodeOptions) -> None:
    """Times forwards of the whole model after 64 tokens, with the logits of every row."""
    from runtime.bench.forwards import PREFILL

    plan = _plan("decode", options)
    tasks = [("decode", width) for width in plan.widths] + [("prefill", PREFILL)] * options.prefill
    _run(plan, _forwards(tasks, options))


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> None:
    """Times verifying γ = width − 1 drafted tokens in one forward, over a forward of one token."""
    plan = _plan("verify", options)
    tasks = [("chain", width) for width in dict.fromkeys((1, *plan.widths))]
    if options.tree:
        # Up to two rows a tree is a chain.
        tasks += [("tree", width) for width in plan.widths if width > 2]
    _run(plan, _forwards(tasks, options))


@takes(SpeculateOptions)
def speculate(options: SpeculateOptions) -> None:
    """Measures speculative against plain decoding of the same target: speed, acceptance, prediction, mismatches."""
    from runtime.bench.jobs import Between, facts_of, opened_job, say
    from runtime.bench.output import show_speculation, write
    from runtime.bench.speculate import measure, row

    at_least_one({"--rounds": options.rounds})
    if options.protocol is not None:
        from runtime.bench.speed_bench_command import speed_bench

        return speed_bench(options)
    with opened_job(options) as (job, model):
        between = Between(job, model, options.rounds) if options.batch == 1 else None
        plain, spoken = measure(job, options.rounds, say, between)
        found = row(job, plain, spoken, None if between is None else between.costs())
        show_speculation(facts_of(job, model), found)
        if options.json_file is not None:
            write(options.json_file, facts_of(job, model) | {"result": found})


@takes(LoadOptions)
def load(options: LoadOptions) -> None:
    """Sends requests in a Poisson process; with a bound finds the highest rate that stays under it."""
    from runtime.bench.jobs import facts_of, opened_job, say
    from runtime.bench.load import LONGEST, Bound, highest_rate, serve
    from runtime.bench.output import show_load, write
    from runtime.bench.speculate import Way, run_once, ways

    at_least_one({"--requests": options.requests})
    limits = (options.max_latency, options.max_ttft)
    for option, value in (("--rate", options.rate), ("--max-latency", limits[0]), ("--max-ttft", limits[1])):
        if value is not None and not 0 < value < 1e6:
            raise UserError(f"{option} must be above 0, found {value:g}")
    if (seconds := options.requests / options.rate) > LONGEST:
        raise UserError(
            f"--rate: at {options.rate:g} a second {options.requests} requests take {seconds:.3g} seconds, and a run"
            f" may take {LONGEST}; ask for a higher rate or fewer requests"
        )
    bound = Bound(*(None if limit is None else limit * 1e3 for limit in limits))
    with opened_job(options) as (job, model):
        results: dict[str, dict[str, Any]] = {}
        for way in ways(job):
            run_once(job, way, job.items[:1])

            def run(rate: float, way: Way = way) -> Any:
                say(f"{way.drafter.name}: {rate:.3g} requests a second")
                return serve(job, way, rate, options.requests, options.seed)

            held: float | None = None
            tried: Sequence[Any]
            if limits == (None, None):
                tried = [run(options.rate)]
            else:
                held, tried = highest_rate(run, options.rate, bound)
            name = way.drafter.name if results else "plain"
            results[name] = {"highest_rate": held, "runs": [asdict(one) for one in tried]}
        show_load(facts_of(job, model), results, limits != (None, None))
        if options.json_file is not None:
            write(options.json_file, facts_of(job, model) | {"bound_ms": asdict(bound), "result": results})


@takes(DigestOptions)
def digest(options: DigestOptions) -> None:
    """Digests of a model's logits on a fixed text, the same on every CPU; of a run, beside what its manifest has.

    Exit code 1 where they differ.
    """
    from runtime.bench.digest import differing, digests, promised
    from runtime.bench.output import console, write
    from runtime.model.load import load

    writable("--json", options.json_file)
    model = load(options.target, threads=options.threads, kernels=options.kernels)
    found, entry = digests(model.decoder), promised(model.path)
    expected = None if entry is None else entry["sha256"]
    other = [] if expected is None else differing(found, expected)
    out = console(100)
    for part, text in found.items():
        out.print(f"{part:16}{text}", soft_wrap=True)
    if entry is not None:
        verdict = "equal to the manifest's"
        if other:
            verdict = f"differs from the manifest's: {', '.join(other)}"
        elif expected is None:
            verdict = f"the manifest has none: {entry.get('why')}"
        out.print(verdict, soft_wrap=True)
    if options.json_file is not None:
        told = {"kernels": model.decoder.kernels, "sha256": found, "manifest": expected, "differs": other}
        write(options.json_file, told)
    if other:
        raise typer.Exit(1)


def _plan(command: str, options: LayerOptions) -> Plan:
    """Raises UserError for anything that is not offered."""
    from runtime.bench.random_models import SCHEMES, model_config
    from runtime.devices import use_threads
    from runtime.kernels.dispatch import choose
    from runtime.native import default_threads

    schemes = tuple(dict.fromkeys(options.scheme or SCHEMES))
    for name in schemes:
        if name == _NESTED and command != "decode":
            raise UserError("--scheme nested is for `decode`, which times its draft too; name int8 here")
        model_config(options.shape, _STORED.get(name, name), options.head)
    widths = numbers("--widths", options.widths, WIDEST)
    at_least_one({"--rounds": options.rounds})
    writable("--json", options.json_file)
    threads = default_threads() if options.threads is None else options.threads
    use_threads(threads)
    return Plan(command, options, schemes, widths, choose(options.kernels, "cpu", threads), threads)


def _forwards(tasks: Sequence[tuple[str, int]], options: DecodeOptions | VerifyOptions) -> "Measure":
    """Measures a scheme on a model on disk."""
    from runtime.bench.forwards import time_forwards
    from runtime.model.base import BaseDecoder
    from runtime.model.load import load

    def measure(plan: Plan, scheme: str, memory: "Bandwidth") -> "list[Row]":
        nested = scheme == _NESTED
        with _model(options, _STORED.get(scheme, scheme), options.work, options.layers) as path:
            decoder = load(path, threads=plan.threads, kernels=plan.kernel.name, planes=nested).decoder
            assert isinstance(decoder, BaseDecoder)
            draft = decoder.upper() if nested else None
            return time_forwards(decoder, scheme, tasks, options.rounds, memory, draft)

    return measure


@contextmanager
def _model(options: LayerOptions, scheme: str, work: Path | None, layers: int | None) -> Iterator[Path]:
    """A model directory: written for this run, or kept in `work`. Raises UserError for a foreign one there."""
    from runtime.bench.random_models import model_config, write_shape
    from runtime.files import read_json

    shape, head = options.shape, options.head
    if work is None:
        with TemporaryDirectory(prefix="specpress-bench-") as folder:
            yield write_shape(shape, scheme, Path(folder) / "model", head, layers=layers)
        return
    path = work / f"{shape}-{scheme}-head-{head}{'' if layers is None else f'-layers-{layers}'}"
    if not path.exists():
        try:
            work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--work: {work} cannot be made ({error.strerror}); choose another folder") from error
        write_shape(shape, scheme, path, head, layers=layers)
    elif not (path / "config.json").is_file() or read_json(path / "config.json") != model_config(
        shape, scheme, head, layers
    ):
        raise UserError(f"--work: {path} holds another model than this version writes; remove it")
    yield path


def _run(plan: Plan, measure: "Measure") -> None:
    """Measures scheme after scheme, prints a table each, and writes the file at the end."""
    from statistics import median

    from rich.console import Console

    from runtime.bench.forwards import CONTEXT
    from runtime.bench.measure import WARM_UP, machine, reading_speed
    from runtime.bench.output import console, show_scheme, write

    options, out = plan.options, console(112)
    context = None if plan.command == "kernels" else CONTEXT
    after = "" if context is None else f"; after {context} tokens, logits of every row"
    layers = getattr(options, "layers", None)
    first = "" if layers is None else f" (first {layers} layers)"
    out.print(
        f"{options.shape}{first}, random weights: speed only. {machine()['cpu']}, {plan.threads} threads,"
        f" {plan.kernel.name} kernels; head {options.head}{after}; {options.rounds} interleaved rounds.",
        soft_wrap=True,
    )
    notes = Console(stderr=True, highlight=False)
    rows: list[dict[str, Any]] = []
    readings: dict[str, list[float]] = {}
    for scheme in plan.schemes:
        memory = reading_speed(plan.threads)
        # Shows nothing where standard error is not a terminal.
        with notes.status(f"{scheme}: writing, loading, timing"):
            found = measure(plan, scheme, memory)
        rows += found
        readings[scheme] = memory.readings
        show_scheme(out, plan.command, scheme, found, memory.readings)
    if options.json_file is not None:
        # Bandwidths in bytes per second, null where the native kernels are missing.
        every = [reading for found in readings.values() for reading in found]
        told = {
            "machine": machine(),
            "threads": plan.threads,
            "kernels": plan.kernel.name,
            "bandwidth": median(every) if every else None,
            "protocol": {
                "command": plan.command,
                "shape": options.shape,
                "layers": layers,
                "weights": "random, speed only",
                "head": options.head,
                "context": context,
                "rounds": options.rounds,
                "warm_up_rounds": WARM_UP,
                "order": "each round times everything of one scheme once",
                "gb_per_second": "bytes of weights, as the kernels hold them, and of states, read and written, over "
                "ms_median; without keys and values",
                "share_of_bandwidth": "of the better reading before and after each sample; median over the rounds",
                "bandwidth_by_scheme": {scheme: median(found) if found else None for scheme, found in readings.items()},
            },
            "rows": rows,
        }
        write(options.json_file, told)
