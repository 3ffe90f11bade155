"""The commands of `python -m runtime.bench gpu`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.bench.options import (
    Device,
    JobOptions,
    Json,
    Kernels,
    Kinds,
    NewTokens,
    OracleOptions,
    Rounds,
    Schemes,
    ShapeName,
    ShapeNames,
    Widths,
    at_least_one,
    bench_on,
    known,
    numbers,
    writable,
)
from runtime.cli import takes, without_traceback
from runtime.errors import UserError

if TYPE_CHECKING:
    from runtime.contract import CacheKind

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="What a GPU is measured by.")
Choices = Annotated[
    Path | None, typer.Option("--choices", help="Write what was quicker than Triton, as runtime/kernels/choices.json.")
]


@app.command()
@without_traceback()
def decode(
    shape: ShapeNames = ["tinyllama-1.1b", "llama-3.1-8b", "llama-3.1-70b"],  # noqa: B006 (typer reads it)
    scheme: Schemes = ["bf16", "int8", "int4", "nf4", "ternary"],  # noqa: B006
    widths: Widths = "1,2,4,8,16",
    context: Annotated[int, typer.Option(help="Tokens in the cache before the step.")] = 512,
    cache: Annotated[str, typer.Option(help="float32, float16, int8, int4 or int3.")] = "float32",
    device: Device = "cuda",
    kernels: Kernels = "auto",
    rounds: Rounds = 20,
    json_file: Json = None,
) -> None:
    """Times a step (forward and greedy choice) after a context, at each width, for each scheme."""
    from runtime.bench.decode import Steps, time_shape
    from runtime.bench.output import finish, show

    bench, counts = bench_on(device, rounds, json_file, kernels), numbers("--widths", widths, 256)
    asked = Steps(counts, context, _kinds("--cache", [cache])[0])
    columns = (
        "scheme what kernels width ms_median tokens_per_second bytes_read gb_per_second"
        " share_of_bandwidth over_width_1 over_bf16"
    )
    for name in _shapes(shape):
        found = time_shape(bench, name, scheme, asked)
        bench.rows += found
        show(f"{name}, random weights, after {context} tokens ({cache} cache)", columns, found, bench.place)
    finish("decode", bench, json_file, context=context)


@app.command()
@without_traceback()
def kernels(
    shape: ShapeNames = ["llama-3.1-8b"],  # noqa: B006
    scheme: Schemes = ["int8", "int4", "nf4", "fp8", "bf16"],  # noqa: B006
    widths: Widths = "1,2,4,8,16,64,512",
    device: Device = "cuda",
    kernels: Kernels = "auto",
    rounds: Rounds = 20,
    json_file: Json = None,
    choices_file: Choices = None,
) -> None:
    """Times layers on our kernels and on every library's that takes them; the winners are a table of choices."""
    from runtime.bench.kernels import time_layers, winners
    from runtime.bench.output import finish, show, show_choices
    from runtime.bench.random_models import DEVICE_SCHEMES
    from runtime.kernels.dispatch import choose

    bench, counts = bench_on(device, rounds, json_file, kernels), numbers("--widths", widths, 4096)
    writable("--choices", choices_file)
    place = bench.place
    beside_triton = place.is_gpu and choose(kernels, str(place.device), table=()).name == "triton"
    if choices_file is not None and not beside_triton:
        raise UserError("--choices compares libraries with Triton's kernels on a GPU: leave it out elsewhere")
    columns = (
        "layer scheme engine how width ms_median gb_per_second share_of_bandwidth over_width_1 relative_error same_bits"
    )
    for name in _shapes(shape):
        found = time_layers(bench, name, known("--scheme", scheme, DEVICE_SCHEMES), counts)
        bench.rows += found
        show(f"{name}'s layers, random weights", columns, found, place)
    finish("kernels", bench, json_file)
    if beside_triton:
        show_choices(winners(bench.rows, place.capability, place.measured_on()), choices_file)


@app.command()
@takes(OracleOptions)
def speculate(options: OracleOptions) -> None:
    """Speculation at a known acceptance and a draft's real cost: measured beside predicted speed-up."""
    from runtime.bench.output import finish, show
    from runtime.bench.speculate_gpu import oracle

    bench = bench_on(options.device, options.rounds, options.json_file, options.kernels)
    lengths = numbers("--draft-lengths", options.draft_lengths, 64)
    _shapes([options.shape, options.draft])
    oracle(bench, options, lengths)
    columns = (
        "draft_length acceptance_rate tokens_per_round draft_cost_ratio step_ms speedup decode_speedup"
        " predicted_speedup mismatches"
    )
    title = f"{options.shape} and {options.draft}, {options.scheme}, oracle right with {options.alpha:g} a token"
    show(title, columns, bench.rows, bench.place)
    finish("speculate", bench, options.json_file, timed=False, alpha=options.alpha, new_tokens=options.new_tokens)


@app.command()
@without_traceback()
def attention(
    shape: ShapeName = "llama-3.1-8b",
    kind: Kinds = ["float16", "int8", "int4"],  # noqa: B006
    context: Annotated[int, typer.Option(help="Tokens of each request.")] = 32_768,
    batch: Annotated[int, typer.Option(help="Requests.")] = 8,
    widths: Widths = "1,5",
    device: Device = "cuda",
    rounds: Rounds = 20,
    json_file: Json = None,
) -> None:
    """Times one layer's attention over long caches, and compares time and memory with what is computed for them."""
    from runtime.bench.decode import time_kinds
    from runtime.bench.output import finish, show

    bench, counts = bench_on(device, rounds, json_file), numbers("--widths", widths, 16)
    kinds = _kinds("--kind", kind)
    at_least_one({"--context": context, "--batch": batch})
    [name] = _shapes([shape])
    time_kinds(bench, name, kinds, context, batch, counts)
    columns = "scheme width ms_median computed_ms bytes_computed bytes_held gb_per_second share_of_bandwidth"
    title = f"{name}, one layer's attention, {batch} requests of {context} tokens"
    show(title, columns, bench.rows, bench.place)
    finish("attention", bench, json_file)


@app.command()
@without_traceback()
def batch(
    target: Annotated[str, typer.Option(help="A model directory or run folder.", show_default=False)],
    draft: Annotated[str | None, typer.Option(help="Its draft's directory.", show_default="the run's own")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A text or .jsonl file of prompts.")] = None,
    sizes: Annotated[str, typer.Option(help="Requests at a time.")] = "1,2,4,8,16,32,64,128,256",
    draft_length: Annotated[int, typer.Option(help="Tokens drafted a round.")] = 4,
    new_tokens: NewTokens = 64,
    device: Device = "cuda",
    rounds: Rounds = 3,
    json_file: Json = None,
) -> None:
    """Plain and speculative greedy decoding of a real pair in batches: tokens/s, and the texts that differ."""
    from runtime.bench.jobs import opened_job
    from runtime.bench.output import finish, show
    from runtime.bench.speculate_gpu import batches

    bench, counts = bench_on(device, rounds, json_file), numbers("--sizes", sizes, 1024)
    options = JobOptions(
        target=target,
        drafter="model",
        draft=draft,
        prompts=prompts,
        new_tokens=new_tokens,
        draft_length=draft_length,
        device=device,
    )
    with opened_job(options) as (job, _):
        batches(bench, job, counts)
    columns = "batch plain_tokens_per_second speculative_tokens_per_second speedup acceptance_rate prompts mismatches"
    show(f"{Path(target).name}, greedy, γ = {draft_length}", columns, bench.rows, bench.place)
    finish("batch", bench, json_file, timed=False, new_tokens=new_tokens)


@app.command()
@without_traceback()
def tune(
    shape: ShapeName = "llama-3.1-8b",
    scheme: Schemes = ["int4"],  # noqa: B006
    widths: Widths = "1,8",
    device: Device = "cuda",
    rounds: Rounds = 8,
    json_file: Json = None,
) -> None:
    """Tries tile sizes of the linear kernels; the quickest ones belong into runtime/kernels/triton/tile_sizes.py."""
    from runtime.bench.output import finish, show
    from runtime.bench.tune import time_tiles

    bench, counts = bench_on(device, rounds, json_file), numbers("--widths", widths, 512)
    [name] = _shapes([shape])
    time_tiles(bench, name, scheme, counts)
    columns = "scheme layer width block_n warps stages ms_median gb_per_second"
    show(f"{name}, quickest first", columns, bench.rows, bench.place)
    finish("tune", bench, json_file)


@app.command()
@without_traceback()
def generate(
    shape: ShapeName = "llama-3.1-8b",
    scheme: Schemes = ["bf16", "int4"],  # noqa: B006
    prompt: Annotated[int, typer.Option(help="Random tokens before the new ones.")] = 64,
    new_tokens: NewTokens = 128,
    device: Device = "cuda",
    kernels: Kernels = "auto",
    rounds: Rounds = 5,
    json_file: Json = None,
) -> None:
    """transformers' generate (eager; static cache and compile) beside plain decoding here."""
    from runtime.bench.generate import time_ways
    from runtime.bench.output import finish, show

    bench = bench_on(device, rounds, json_file, kernels)
    [name] = _shapes([shape])
    time_ways(bench, name, scheme, prompt, new_tokens)
    columns = "way tokens_per_second ms_per_token over_eager"
    show(f"{name}, random weights, {new_tokens} tokens after {prompt}, batch 1", columns, bench.rows, bench.place)
    finish("generate", bench, json_file)


def _shapes(names: list[str]) -> list[str]:
    from runtime.bench.shapes import SHAPES

    return known("--shape", names, list(SHAPES))


def _kinds(option: str, names: list[str]) -> "tuple[CacheKind, ...]":
    """Kinds of caches, each once. Raises UserError for others."""
    from typing import get_args

    from runtime.contract import CacheKind

    if unknown := set(names) - set(get_args(CacheKind)):
        raise UserError(f"{option}: expected {', '.join(get_args(CacheKind))}, found {', '.join(sorted(unknown))}")
    kinds: Any = tuple(dict.fromkeys(names))
    return kinds  # type: ignore[no-any-return]
