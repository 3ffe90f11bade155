"""Specpress' server and llama.cpp's, with the same weights, threads and client: tokens a second and time to the first.

    make llama-server
    .venv/bin/python examples/compare/serving.py

Random weights of a published shape in int4, and their export to GGUF (Q4_0, Q8_0 for the head), which holds exactly the
same numbers. Both servers are up all the time, and cells take turns, so that both meet the machine in the same state.
"""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.request import urlopen

import typer

from runtime.bench.options import at_least_one, numbers, say, writable
from runtime.cli import without_traceback
from runtime.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
START = 300.0  # seconds
COLUMNS = (
    *(("cell", "cell", "s"), ("clients", "clients", "d"), ("specpress", "specpress", ".1f")),
    *(("llama_server", "llama-server", ".1f"), ("unit", "", "s"), ("ratio", "ours / theirs", ".2f")),
)


@dataclass(frozen=True)
class Cell:
    """One figure: `clients` texts of `new` tokens at once after prompts of `prompt`; of `kind` tokens/s or ttft.

    repeats  the prompt repeats itself, and both servers draft from what stands in the text.
    """

    name: str
    clients: int
    prompt: int
    new: int
    kind: str = "tokens/s"
    repeats: bool = False


@app.command()
def main(
    llama_server: Annotated[Path, typer.Option(help="The binary that `make llama-server` builds.")] = Path(
        ".peers/llama-server"
    ),
    shape: Annotated[str, typer.Option(help="A published model's sizes.")] = "tinyllama-1.1b",
    clients: Annotated[str, typer.Option(help="Clients at a time, comma-separated.")] = "1,4,8,16",
    tokens: Annotated[int, typer.Option(help="Of each prompt, and of each answer.", min=8)] = 128,
    long_prompt: Annotated[int, typer.Option(help="Tokens of the prompt whose first answer is timed.", min=8)] = 512,
    threads: Annotated[int, typer.Option(help="Of both.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Turns of each cell.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Starts both servers and prints every cell, lost ones too: ratios above 1 are ours, for times below 1."""
    with without_traceback():
        at_least_one({"--rounds": rounds})
        counts = numbers("--clients", clients, 256)
        writable("--json", json_file)
        if not llama_server.is_file():
            raise UserError(f"--llama-server: there is no {llama_server}; `make llama-server` builds it")
        from runtime.bench.measure import machine
        from runtime.bench.output import console, table, write

        cells = [Cell("decode", count, tokens, tokens) for count in counts]
        cells += [Cell(f"first token of {long_prompt}", 1, long_prompt, 8, "ttft")]
        cells += [Cell("text that repeats, drafts", 1, tokens, tokens, repeats=True)]
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="specpress-serving-")))
            model, exported, vocabulary = _models(folder, shape)
            # llama-server gives each of its slots an equal part of the context.
            room = max(2 * tokens, long_prompt + 8) + 64
            ours = stack.enter_context(_specpress(model, threads, max(counts)))
            theirs = stack.enter_context(_llama(llama_server, exported, threads, max(counts), max(counts) * room))
            drafting = stack.enter_context(
                _llama(llama_server, exported, threads, 1, room, "--spec-type", "ngram-simple")
            )
            found: dict[Cell, tuple[list[float], list[float]]] = {cell: ([], []) for cell in cells}
            for number in range(-1, rounds):  # the first one warms up
                say(f"round {number + 1} of {rounds}")
                for cell in cells:
                    ports = (ours, drafting if cell.repeats else theirs)
                    for place in (0, 1) if number % 2 else (1, 0):
                        figure = _measure(ports[place], cell, vocabulary, place == 0, number)
                        if number >= 0:
                            found[cell][place].append(figure)
        rows = [_row(cell, *found[cell]) for cell in cells]
        console(110).print(
            f"{shape}, random int4 weights and their GGUF export; {machine()['cpu']}, {threads} threads; {tokens}"
            f" tokens in and out, greedy; medians of {rounds} interleaved rounds",
            soft_wrap=True,
        )
        console(110).print(table(COLUMNS, rows))
        if json_file is not None:
            write(json_file, {"machine": machine(), "shape": shape, "threads": threads, "rows": rows})


def _row(cell: Cell, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    scale, unit = (1e3, "ms") if cell.kind == "ttft" else (1.0, "tokens/s")
    ratio = median(mine / other for mine, other in zip(ours, theirs, strict=True))
    figures = {"specpress": median(ours) * scale, "llama_server": median(theirs) * scale}
    return {"cell": cell.name, "clients": cell.clients, **figures, "unit": unit, "ratio": ratio}


def _measure(port: int, cell: Cell, vocabulary: int, ours: bool, number: int) -> float:
    """Tokens a second, or seconds to the first token."""
    import numpy as np

    from runtime.bench.http import streams

    draws = np.random.default_rng(1000 * (number + 1) + cell.clients)
    asked = []
    for place in range(cell.clients):
        prompt = draws.integers(256, vocabulary, cell.prompt).tolist()
        if cell.repeats:
            prompt = (prompt[:16] * (cell.prompt // 16 + 1))[: cell.prompt]
        one: dict[str, Any] = {"prompt": prompt, "max_tokens": cell.new, "temperature": 0, "ignore_eos": True}
        if ours:
            drafter = "lookup" if cell.repeats else "none"
            one |= {"cache_salt": f"{number} {place}", "specpress": {"drafter": drafter}}
        else:
            one |= {"cache_prompt": False}
        asked.append(one)
    speed, first = streams(port, asked)
    return first if cell.kind == "ttft" else speed


def _models(folder: Path, shape: str) -> tuple[Path, Path, int]:
    """(our model, its GGUF export, ids of the vocabulary). Raises UserError for an unknown shape."""
    from compress import export
    from compress.progress import show
    from runtime.bench.random_models import write_shape
    from runtime.bench.random_tokenizer import write_tokenizer
    from runtime.files import read_json

    say("writing random weights, and exporting them")
    model = write_shape(shape, "int4", folder / "model", "int8")
    vocabulary = int(read_json(model / "config.json")["vocab_size"])
    write_tokenizer(model, vocabulary)
    with show() as progress:
        export.run("gguf", model, folder / "gguf", progress, False)
    return model, next((folder / "gguf").glob("*.gguf")), vocabulary


@contextmanager
def _specpress(model: Path, threads: int, batch: int) -> Iterator[int]:
    command = [sys.executable, "-m", "runtime.serve", "--target", f"bench={model}", "--port", "0"]
    command += ["--threads", str(threads), "--max-batch", str(batch), "--drafter", "lookup"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("ready: "):
            raise UserError("our server did not start; what it said stands above")
        yield int(line.rsplit(":", 1)[1])
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _llama(binary: Path, model: Path, threads: int, slots: int, room: int, *more: str) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(binary.absolute()), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", str(threads), "--threads-batch", str(threads), "--parallel", str(slots), "-c", str(room)]
    log = model.with_name(f"llama-server-{port}.log")
    with log.open("w") as said:
        process = subprocess.Popen([*command, *more], stdout=said, stderr=said)
    try:
        _wait(port, process, log)
        yield port
    finally:
        process.terminate()
        process.wait()


def _wait(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if json.load(answer).get("status") == "ok":
                    return
        except OSError:
            pass
        time.sleep(0.2)
    shutil.copyfile(log, "llama-server.log")
    raise UserError("llama-server did not start; llama-server.log has what it said")


if __name__ == "__main__":
    app()
