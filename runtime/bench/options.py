"""The options of the benchmarks, each said once, and their checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.errors import UserError

if TYPE_CHECKING:
    from runtime.bench.measure import Bench

WIDEST = 512
Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]
Widths = Annotated[str, typer.Option(help="Rows of one forward, with commas between them.")]
Rounds = Annotated[int, typer.Option(help="Interleaved rounds that count.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")]
Alpha = Annotated[float, typer.Option(help="The oracle's acceptance per token.")]
Layers = Annotated[int | None, typer.Option(help="The model of its first layers alone.", show_default="all")]
Work = Annotated[Path | None, typer.Option(help="Keep the models here between runs.", show_default="removed")]
# Those of shapes.py, which takes torch to import.
SHAPE_NAMES = (
    *("tinyllama-1.1b", "tinyllama-tenth", "llama-3.2-1b", "llama-2-7b", "llama-3.1-8b", "llama-3.1-8b-tenth"),
    *(
        "llama-3.1-70b",
        "qwen2.5-0.5b",
        "qwen3-4b",
        "gemma-3-4b",
        "qwen3.5-4b",
        "gpt-oss-20b",
        "glm-4-9b",
        "granite-3.3-2b",
    ),
    *("olmo-3-7b", "smollm3-3b", "ministral-3-8b", "lfm2-1.2b", "deepseek-v2-lite", "olmoe-1b-7b"),
    *("qwen2-57b-a14b", "pair"),
)
# Of `gpu`.
Device = Annotated[str, typer.Option(help="cuda, cuda:N, or cpu: interpreted, at toy sizes, no speed.")]
Kernels = Annotated[
    str, typer.Option(help="auto, triton, library, a library's name, bitsandbytes, plain-torch or reference.")
]
ShapeNames = Annotated[list[str], typer.Option("--shape", help="A published model's sizes; may be repeated.")]
ShapeName = Annotated[str, typer.Option("--shape", help="A published model's sizes.")]
Schemes = Annotated[list[str], typer.Option("--scheme", help="bf16, fp8, int8, int4, nf4 or ternary; may be repeated.")]
Kinds = Annotated[list[str], typer.Option(help="float32, float16, int8, int4 or int3; may be repeated.")]
NewTokens = Annotated[int, typer.Option(help="Tokens of each text.")]


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Of `kernels`, and what `decode` and `verify` share with it."""

    shape: Annotated[str, typer.Option(help=f"A published model's sizes: {', '.join(SHAPE_NAMES)}.")] = "tinyllama-1.1b"
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            help="f32, bf16, int8, int4, nf4, ternary (or -1.25), trellis-2 to -4 (of decode also nested); repeatable.",
            show_default="all",
        ),
    ] = None
    head: Annotated[str, typer.Option(help="int8: a packed output head; keep: as the architecture has it, plain.")] = (
        "int8"
    )
    widths: Widths = "1,2,4,8,16"
    threads: Threads = None
    kernels: Annotated[str, typer.Option(help="auto, plain-torch, reference, or a native path's name.")] = "auto"
    rounds: Rounds = 15
    json_file: Json = None


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(LayerOptions):
    """Of `decode`."""

    prefill: Annotated[bool, typer.Option("--prefill", help="Also a prompt of 512 tokens.")] = False
    layers: Layers = None
    work: Work = None


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(LayerOptions):
    """Of `verify`."""

    tree: Annotated[bool, typer.Option("--tree", help="Also binary trees of as many rows.")] = False
    layers: Layers = None
    work: Work = None


@dataclass(frozen=True, kw_only=True)
class DigestOptions:
    """Of `digest`."""

    target: Annotated[
        str, typer.Option(help="A model directory, run folder, GGUF file or hub name.", show_default=False)
    ]
    kernels: Annotated[str, typer.Option(help="auto, reference, or a native path's name.")] = "auto"
    threads: Threads = None
    json_file: Json = None


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What `speculate` and `load` share: a target, its drafter and prompts."""

    target: Annotated[str | None, typer.Option(help="A model directory or run folder; or name a --shape.")] = None
    shape: Annotated[str | None, typer.Option(help="A shape with random weights instead: speed only.")] = None
    scheme: Annotated[
        str, typer.Option(help="Of --shape: f32, bf16, int8, int4, nf4, ternary, ternary-1.25 or trellis-2 to -4.")
    ] = "int4"
    drafter: Annotated[
        str | None,
        typer.Option(
            help="none, model, tree, lookup, suffix, nested, medusa, block, eagle3, peagle, dflash, dspark, mtp, two of"
            " them with a plus, grammar (with --schema) or oracle (oracle+nested, oracle+block: at their cost).",
            show_default="block where the run has one, model where there is a draft, else lookup",
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(help="A shape's name, or the directory of a draft model, Medusa heads, a block or another head."),
    ] = None
    alpha: Alpha = 0.8
    rates: Annotated[
        str | None,
        typer.Option(
            help="oracle+block: acceptance at each position where all before it were accepted, from the first; the"
            " last one goes on, as in 0.9,0.8.",
            show_default="--alpha at all",
        ),
    ] = None
    corpus: Annotated[Path | None, typer.Option(help="A text for the drafter suffix.")] = None
    tree: Annotated[
        str | None,
        typer.Option(help="A fixed shape for the drafter tree, such as 2,2,1,1.", show_default="trees that grow"),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A text, .jsonl or .parquet file; Spec-Bench's, HumanEval's, SPEED-Bench's.", show_default="random"
        ),
    ] = None
    count: Annotated[int | None, typer.Option(help="Only so many prompts, spread over the groups.")] = None
    new_tokens: Annotated[int, typer.Option(help="Tokens of each text; stop tokens do not end it.")] = 128
    batch: Annotated[int, typer.Option(help="Requests at a time.")] = 1
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0
    seed: Annotated[int, typer.Option(help="Of sampling, random prompts, the oracle and arrivals.")] = 0
    verify: Annotated[str, typer.Option(help="coupled or rejection, for temperatures above 0.")] = "coupled"
    draft_length: Annotated[
        int | None, typer.Option(help="Tokens drafted a round.", show_default="what pays most, chosen every round")
    ] = None
    threads: Threads = None
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu"
    kernels: Annotated[str, typer.Option(help="As `load` takes them: auto, a native path, reference, …")] = "auto"
    json_file: Json = None


@dataclass(frozen=True, kw_only=True)
class SpeculateOptions(JobOptions):
    """Of `speculate`."""

    schema: Annotated[
        Path | None, typer.Option(help="A JSON schema that each text keeps to; texts then end with their object.")
    ] = None
    rounds: Annotated[int, typer.Option(help="Passes over the prompts, plain and speculative in turns.")] = 3
    protocol: Annotated[
        str | None,
        typer.Option(help="speed-bench: acceptance by category, then speed by input length and requests at a time."),
    ] = None
    lengths: Annotated[str, typer.Option(help="Of speed-bench: input tokens, as far as the model's positions go.")] = (
        "1024,2048,4096,8192,16384"
    )
    concurrency: Annotated[str, typer.Option(help="Of speed-bench: requests at a time.")] = "1,2,4,8,16"
    out: Annotated[Path | None, typer.Option(help="Of speed-bench: a folder for its files, in its layout.")] = None


@dataclass(frozen=True, kw_only=True)
class LoadOptions(JobOptions):
    """Of `load`."""

    rate: Annotated[float, typer.Option(help="Requests a second, on average.", show_default=False)]
    new_tokens: Annotated[int, typer.Option(help="Tokens of each text; stop tokens do not end it.")] = 64
    batch: Annotated[int, typer.Option(help="The most requests in one forward.")] = 16
    requests: Annotated[int, typer.Option(help="Requests of one run.")] = 50
    max_latency: Annotated[float | None, typer.Option(help="Seconds that P90 latency must stay under.")] = None
    max_ttft: Annotated[float | None, typer.Option(help="Seconds that P90 time to first token must stay under.")] = None


@dataclass(frozen=True, kw_only=True)
class HttpOptions(JobOptions):
    """Of `http`."""

    clients: Annotated[str, typer.Option(help="Clients at a time, with commas between the numbers.")] = "1,16"
    rounds: Annotated[int, typer.Option(help="Passes in-process and over HTTP, in turns.")] = 5
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Also a replica on Ray, with the ingress, against the server alone.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class OracleOptions:
    """Of `gpu speculate`."""

    shape: ShapeName = "llama-3.1-8b"
    draft: Annotated[str, typer.Option(help="The draft's shape.")] = "llama-3.1-8b-tenth"
    scheme: Annotated[
        str, typer.Option(help="Of both: bf16, int8, int4, nf4, ternary, ternary-1.25 or trellis-2 to -4.")
    ] = "int4"
    alpha: Alpha = 0.8
    draft_lengths: Annotated[str, typer.Option(help="Tokens drafted a round, with commas between them.")] = "2,4,6,8"
    prompts: Annotated[int, typer.Option(help="Prompts of 64 random tokens.")] = 4
    new_tokens: NewTokens = 128
    device: Device = "cuda"
    kernels: Kernels = "auto"
    rounds: Rounds = 3
    json_file: Json = None


def bench_on(device: str, rounds: int, json_file: Path | None, kernels: str = "auto") -> "Bench":
    """A benchmark of `gpu`, once the options that all of these share are checked. Raises UserError."""
    from runtime.bench.measure import Bench, find

    at_least_one({"--rounds": rounds})
    writable("--json", json_file)
    return Bench(find(device), rounds, kernels, say)


def at_least_one(values: dict[str, int | None]) -> None:
    """Raises UserError for an option whose value is below 1; None is one that was not given."""
    for option, value in values.items():
        if value is not None and value < 1:
            raise UserError(f"{option} must be at least 1, found {value}")


def writable(option: str, file: Path | None) -> None:
    """Raises UserError for a file that cannot be written there."""
    if file is not None and ((file.exists() and not file.is_file()) or not file.absolute().parent.is_dir()):
        raise UserError(f"{option}: {file} cannot be a file: it is a folder or a device, or lies in none; name another")


def numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    """Numbers with commas between them, in order. Raises UserError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= most for part in parts):
        raise UserError(f"{option}: expected numbers from 1 to {most} with commas between them, found {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def known(option: str, names: Sequence[str], offered: Sequence[str]) -> list[str]:
    """The names, each once. Raises UserError for one that is not offered."""
    if unknown := [name for name in names if name not in offered]:
        raise UserError(f"{option}: {unknown[0]!r} is unknown; use one of {', '.join(offered)}")
    return list(dict.fromkeys(names))


def say(text: str) -> None:
    """Progress, on standard error."""
    typer.echo(text, err=True)
