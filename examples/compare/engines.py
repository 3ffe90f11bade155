"""Specpress and its peers on the same shape, interleaved: random weights, so speed only.

    make peers
    .venv/bin/python examples/compare/engines.py

Each engine runs in a process of its own, the ones of a scheme take turns, and only one computes at any moment.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from catalogue import OURS, SCHEMES, Engine

from runtime.bench.options import writable
from runtime.cli import without_traceback
from runtime.errors import UserError

if TYPE_CHECKING:
    from drive import Plan
    from models import Workshop
    from tables import Compared

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_SHAPES = ("tinyllama-1.1b", "llama-3.2-1b", "qwen2.5-0.5b")


@app.command()
def main(
    shape: Annotated[str, typer.Option(help=", ".join(_SHAPES) + ".")] = _SHAPES[0],
    scheme: Annotated[
        list[str] | None, typer.Option(help=", ".join(SCHEMES) + "; may be repeated.", show_default="all")
    ] = None,
    widths: Annotated[str, typer.Option(help="Tokens of one forward, 1 to 16, comma-separated.")] = "1,4,8",
    prefill: Annotated[int, typer.Option(help="Tokens of the prompt; 0: no prefill.", min=0)] = 512,
    context: Annotated[int, typer.Option(help="Tokens in the cache before each forward.", min=1)] = 64,
    threads: Annotated[int | None, typer.Option(help="Of every engine.", show_default="physical cores", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Turns of every engine.", min=1)] = 9,
    prefill_rounds: Annotated[int, typer.Option(help="Rounds that measure the prefill, once each.", min=1)] = 3,
    repeats: Annotated[int, typer.Option(help="Forwards per width and round.", min=1)] = 3,
    peer_python: Annotated[Path, typer.Option(help="The peers' environment.")] = Path(".peers/bin/python"),
    work: Annotated[Path, typer.Option(help="Where the peers' models are kept, 6 GB per shape.")] = Path(
        "runs/compare"
    ),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Runs llama.cpp, OpenVINO, bitsandbytes and Specpress on one shape and prints a table per scheme."""
    with without_traceback():
        _run(
            shape,
            scheme,
            widths,
            prefill,
            context,
            threads,
            (rounds, prefill_rounds, repeats),
            peer_python,
            work,
            json_file,
        )


def _run(
    shape: str,
    scheme: list[str] | None,
    widths: str,
    prefill: int,
    context: int,
    threads: int | None,
    times: tuple[int, int, int],
    peer_python: Path,
    work: Path,
    json_file: Path | None,
) -> None:
    if shape not in _SHAPES:
        raise UserError(f"--shape: expected one of {', '.join(_SHAPES)}, found {shape!r}")
    chosen = list(dict.fromkeys(scheme or SCHEMES))
    for name in chosen:
        if name not in SCHEMES:
            raise UserError(f"--scheme: expected one of {', '.join(SCHEMES)}, found {name!r}")
    parsed = _widths(widths)
    engines = [engine for name in chosen for engine in SCHEMES[name]]
    if any(engine.peer for engine in engines) and not peer_python.is_file():
        raise UserError(f"--peer-python: there is no {peer_python}; `make peers` builds the peers' environment")
    writable("--json", json_file)

    # Imported here: torch takes longer to load than `--help` may take.
    from drive import Plan
    from models import Workshop, make_peers
    from rich.console import Console
    from tables import print_ratios, print_scheme, ratios, report

    from runtime.bench.measure import machine
    from runtime.bench.output import write
    from runtime.bench.random_models import SHAPES
    from runtime.native import PATHS, default_threads, usable

    if not any(usable(path)[0] for path in PATHS):
        raise UserError(f"the native kernels, which are to be compared, do not run here: {usable(PATHS[-1])[1]}")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    notes = Console(highlight=False, stderr=True)
    count = threads or default_threads()
    vocabulary = SHAPES[shape].config["vocab_size"]
    plan = Plan(parsed, prefill, context, vocabulary, *times, threads=count)
    # absolute, not resolved: an environment's python is a link whose own place says which environment it is
    python, peer = Path(sys.executable).absolute(), peer_python.absolute()
    shop = Workshop(work.absolute() / shape, shape, python, peer, count, notes.print)
    make_peers(shop, [engine.model for engine in engines if engine.model])
    console.print(
        f"{shape}, random weights (speed only); {machine()['cpu']}, {count} threads; context {context}, logits of every"
        f" row (prefill: of the last one); {times[0]} interleaved rounds\n",
        soft_wrap=True,
    )
    compared = []
    for name in chosen:
        compared.append(_scheme(shop, name, plan))
        print_scheme(console, compared[-1])
    found = [row for one in compared for row in one.rows]
    print_ratios(console, ratios(found))
    if json_file is not None:
        write(json_file, {"shape": shape, "machine": machine()} | report(plan, compared))


def _widths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 16 for part in parts):
        raise UserError(f"--widths: expected numbers from 1 to 16 with commas between them, found {text!r}")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _scheme(shop: "Workshop", scheme: str, plan: "Plan") -> "Compared":
    """Starts and measures the engines of one scheme; those of another have ended, so that memory holds them all."""
    from drive import measure
    from models import our_model
    from processes import Start
    from tables import Compared, rows

    from runtime.bench.measure import reading_speed

    given = {name: str(getattr(plan, name)) for name in ("context", "prefill", "vocabulary")}

    def start(engine: Engine, ours: Path) -> Start:
        return Start(
            name=engine.name,
            module=engine.worker,
            python=shop.peer_python if engine.peer else shop.python,
            options={"model": str(ours if engine is OURS else shop.folder / engine.model)} | given,
            log=shop.folder / f"{engine.name.replace(' ', '-')}-{scheme}.log",
        )

    shop.say(f"{scheme}: writing our model")
    with our_model(shop, scheme) as ours:
        memory = reading_speed(plan.threads)
        found = measure([start(engine, ours) for engine in SCHEMES[scheme]], plan, memory, shop.say)
    return Compared(scheme, tuple(memory.readings), tuple(found), tuple(rows(scheme, found, plan)))


if __name__ == "__main__":
    app()
