"""The commands `kernels`, `decode` and `verify`: how fast layers, forwards, and the verification of drafts are.

The models have a real architecture and random weights: they are for speed only.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli import without_traceback
from runtime.errors import UserError

if TYPE_CHECKING:
    from runtime.bench.measure import Memory, Row
    from runtime.bench.output import Plan

    Measure = Callable[[str, Memory], list[Row]]

_WIDEST = 512
# An int8 model loaded with planes: beside the target its draft is timed, which reads the upper ones alone.
_NESTED = "nested"
_ShapeName = Annotated[str, typer.Option(help="tinyllama-1.1b, tinyllama-tenth, llama-3.2-1b, qwen2.5-0.5b or pair.")]
_Scheme = Annotated[
    list[str] | None,
    typer.Option(
        help="f32, bf16, int8, int4, nf4 or ternary (decode also: nested); may be repeated.", show_default="all"
    ),
]
_Head = Annotated[str, typer.Option(help="int8: a packed output head; keep: as the architecture has it, plain.")]
_Widths = Annotated[str, typer.Option(help="Rows of one forward, with commas between them.")]
_Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")]
_Kernels = Annotated[str, typer.Option(help="auto, reference, or the name of one native path.")]
_Rounds = Annotated[int, typer.Option(help="Interleaved rounds that count.")]
_Json = Annotated[Path | None, typer.Option("--json", help="Also write the rows to this file.")]
_Work = Annotated[Path | None, typer.Option(help="Keep the models here between runs.", show_default="removed")]


def kernels(
    shape: _ShapeName = "tinyllama-1.1b",
    scheme: _Scheme = None,
    head: _Head = "int8",
    widths: _Widths = "1,2,4,8,16",
    threads: _Threads = None,
    kernels: _Kernels = "auto",
    rounds: _Rounds = 15,
    json_file: _Json = None,
) -> None:
    """Times each linear layer alone, and all of a forward's together, on weights that no cache holds."""
    with without_traceback():
        from runtime.bench.layers import time_layers

        plan = _plan("kernels", shape, scheme, head, widths, threads, kernels, rounds, json_file)

        def measure(name: str, memory: "Memory") -> "list[Row]":
            return time_layers(plan.shape, name, plan.head, plan.kernel, plan.widths, plan.rounds, memory)

        _run(plan, measure)


def decode(
    shape: _ShapeName = "tinyllama-1.1b",
    scheme: _Scheme = None,
    head: _Head = "int8",
    widths: _Widths = "1,2,4,8,16",
    prefill: Annotated[bool, typer.Option("--prefill", help="Also a prompt of 512 tokens.")] = False,
    threads: _Threads = None,
    kernels: _Kernels = "auto",
    rounds: _Rounds = 15,
    work: _Work = None,
    json_file: _Json = None,
) -> None:
    """Times forwards of the whole model after 64 tokens, with the logits of every row."""
    with without_traceback():
        from runtime.bench.forwards import PREFILL

        plan = _plan("decode", shape, scheme, head, widths, threads, kernels, rounds, json_file)
        tasks = [("decode", width) for width in plan.widths] + [("prefill", PREFILL)] * prefill
        _run(plan, _forwards(plan, tasks, work))


def verify(
    shape: _ShapeName = "tinyllama-1.1b",
    scheme: _Scheme = None,
    head: _Head = "int8",
    widths: _Widths = "1,2,4,8,16",
    tree: Annotated[bool, typer.Option("--tree", help="Also binary trees of as many rows.")] = False,
    threads: _Threads = None,
    kernels: _Kernels = "auto",
    rounds: _Rounds = 15,
    work: _Work = None,
    json_file: _Json = None,
) -> None:
    """Times verifying γ = width − 1 drafted tokens in one forward, over a forward of one token."""
    with without_traceback():
        plan = _plan("verify", shape, scheme, head, widths, threads, kernels, rounds, json_file)
        tasks = [("chain", width) for width in dict.fromkeys((1, *plan.widths))]
        if tree:
            # Up to two rows a tree is a chain.
            tasks += [("tree", width) for width in plan.widths if width > 2]
        _run(plan, _forwards(plan, tasks, work))


def _plan(
    command: str,
    shape: str,
    schemes: Sequence[str] | None,
    head: str,
    widths: str,
    threads: int | None,
    kernels: str,
    rounds: int,
    json_file: Path | None,
) -> "Plan":
    """Raises UserError for anything that is not offered."""
    import torch

    from runtime.bench.output import Plan
    from runtime.bench.random_models import SCHEMES, model_config
    from runtime.kernels.dispatch import choose
    from runtime.native import default_threads

    chosen = tuple(dict.fromkeys(schemes or SCHEMES))
    for name in chosen:
        if name == _NESTED and command != "decode":
            raise UserError("--scheme nested is for `decode`, which times its draft too; name int8 here")
        model_config(shape, _stored(name), head)
    parts = [part.strip() for part in widths.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= _WIDEST for part in parts):
        raise UserError(f"--widths: expected numbers from 1 to {_WIDEST} with commas between them, found {widths!r}")
    for option, value in (("--threads", threads), ("--rounds", rounds)):
        if value is not None and value < 1:
            raise UserError(f"{option} must be at least 1, found {value}")
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise UserError(f"--json: {json_file} cannot be a file: it is a folder, or lies in none; name another")
    count = default_threads() if threads is None else threads
    torch.set_num_threads(count)
    found = tuple(sorted({int(part) for part in parts}))
    return Plan(command, shape, chosen, head, found, choose(kernels, "cpu", count), count, rounds, json_file)


def _stored(scheme: str) -> str:
    """The scheme of the model on disk."""
    return "int8" if scheme == _NESTED else scheme


def _forwards(plan: "Plan", tasks: Sequence[tuple[str, int]], work: Path | None) -> "Measure":
    """Measures a scheme on a model on disk."""
    from runtime.bench.forwards import time_forwards
    from runtime.bench.layers import forward_bytes
    from runtime.bench.measure import layers_bytes
    from runtime.model.layers import linears
    from runtime.model.load import load
    from runtime.model.reference import BaseDecoder

    def measure(scheme: str, memory: "Memory") -> "list[Row]":
        nested = scheme == _NESTED
        read = None if nested else forward_bytes(plan.shape, scheme, plan.head, plan.kernel)
        with _model(plan, _stored(scheme), work) as path:
            decoder = load(path, threads=plan.threads, kernels=plan.kernel.name, planes=nested).decoder
            if not nested:
                return time_forwards(decoder, scheme, tasks, plan.rounds, read, memory)
            assert isinstance(decoder, BaseDecoder)
            draft = decoder.upper()
            read, less = (layers_bytes(linears(d.parts)) for d in (decoder, draft))
            return time_forwards(decoder, scheme, tasks, plan.rounds, read, memory, (draft, less))

    return measure


@contextmanager
def _model(plan: "Plan", scheme: str, work: Path | None) -> Iterator[Path]:
    """A model directory: written for this run, or kept in `work`. Raises UserError for a foreign one there."""
    from runtime.bench.random_models import model_config, write_shape
    from runtime.checkpoints.safetensors import read_json

    if work is None:
        with TemporaryDirectory(prefix="specpress-bench-") as folder:
            yield write_shape(plan.shape, scheme, Path(folder) / "model", plan.head)
        return
    path = work / f"{plan.shape}-{scheme}-head-{plan.head}"
    if not path.exists():
        try:
            work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--work: {work} cannot be made ({error.strerror}); choose another folder") from error
        write_shape(plan.shape, scheme, path, plan.head)
    elif not (path / "config.json").is_file() or read_json(path / "config.json") != model_config(
        plan.shape, scheme, plan.head
    ):
        raise UserError(f"--work: {path} holds another model than this version writes; remove it")
    yield path


def _run(plan: "Plan", measure: "Measure") -> None:
    """Measures scheme after scheme, prints a table each, and writes the file at the end."""
    from rich.console import Console

    from runtime.bench.measure import Memory
    from runtime.bench.output import header, print_rows, report, write

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 100)
    notes = Console(stderr=True, highlight=False)
    console.print(header(plan), soft_wrap=True)
    everything: list[Row] = []
    readings: dict[str, list[float]] = {}
    for scheme in plan.schemes:
        memory = Memory(plan.threads)
        # Shows nothing where standard error is not a terminal.
        with notes.status(f"{scheme}: writing, loading, timing"):
            found = measure(scheme, memory)
        everything += found
        readings[scheme] = memory.readings
        print_rows(console, plan.command, scheme, found, memory.readings)
    if plan.json_file is not None:
        write(plan.json_file, report(plan, everything, readings))
