"""Specpress and its peers on the same shape, interleaved: random weights, so speed only.

    make peers
    .venv/bin/python examples/compare/engines.py

Each engine runs in a process of its own, the ones of a scheme take turns, and only one computes at any moment. Another
build of llama.cpp, or a fork of it such as ik_llama.cpp, takes part by its binary: --llama-bench path/to/llama-bench.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from catalogue import GGUF, OURS, SCHEMES, Engine, llama_bench
from llama_bench_binary import bench_binary
from models import interpreters, require_native_kernels

from runtime.bench.options import numbers, say, writable
from runtime.cli import without_traceback
from runtime.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from drive import Plan
    from llama_bench_binary import Binary
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
    kernels: Annotated[str, typer.Option(help="auto, or avx2: every engine keeps to it.")] = "auto",
    llama_bench_path: Annotated[
        Path | None, typer.Option("--llama-bench", help="A llama-bench binary, timed beside the others.")
    ] = None,
    llama_bench_arguments: Annotated[str, typer.Option(help="More arguments for it, such as '-rtr 1'.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Runs llama.cpp, OpenVINO, bitsandbytes and Specpress on one shape and prints a table per scheme."""
    with without_traceback():
        if shape not in _SHAPES:
            raise UserError(f"--shape: expected one of {', '.join(_SHAPES)}, found {shape!r}")
        chosen = list(dict.fromkeys(scheme or SCHEMES))
        for name in chosen:
            if name not in SCHEMES:
                raise UserError(f"--scheme: expected one of {', '.join(SCHEMES)}, found {name!r}")
        parsed = numbers("--widths", widths, 16)
        if kernels not in ("auto", "avx2"):
            raise UserError(f"--kernels: expected auto or avx2, found {kernels!r}")
        binary = None if llama_bench_path is None else bench_binary(llama_bench_path, llama_bench_arguments)
        lists = {name: [*SCHEMES[name], *(map(llama_bench, GGUF[name]) if binary else ())] for name in chosen}
        if kernels != "auto":
            for engine in dict.fromkeys(engine for name in chosen for engine in lists[name] if engine.bound):
                say(f"left out: {engine.name} cannot be held to {kernels} ({engine.bound})")
            lists = {name: [engine for engine in lists[name] if not engine.bound] for name in chosen}
        engines = [engine for name in chosen for engine in lists[name]]
        pythons = interpreters(peer_python, "peers", any(engine.peer for engine in engines))
        writable("--json", json_file)

        # Imported here: torch takes longer to load than `--help` may take.
        from drive import Plan
        from models import Workshop, make_peers
        from tables import print_ratios, print_scheme, ratios, report

        from runtime.bench.measure import machine
        from runtime.bench.output import console, write
        from runtime.bench.shapes import SHAPES
        from runtime.native import default_threads

        require_native_kernels()
        out = console(120)
        count = threads or default_threads()
        vocabulary = SHAPES[shape].config["vocab_size"]
        plan = Plan(parsed, prefill, context, vocabulary, rounds, prefill_rounds, repeats, count)
        shop = Workshop(work.absolute() / shape, shape, *pythons, count, say)
        make_peers(shop, [engine.model for engine in engines if engine.model])
        out.print(
            f"{shape}, random weights (speed only); {machine()['cpu']}, {count} threads; context {context}, logits of"
            f" every row (prefill: of the last one); {rounds} interleaved rounds"
            + (f"; every engine held to {kernels}\n" if kernels != "auto" else "\n"),
            soft_wrap=True,
        )
        compared = []
        for name in chosen:
            compared.append(_scheme(shop, name, lists[name], plan, kernels, binary))
            print_scheme(out, compared[-1])
        found = [row for one in compared for row in one.rows]
        print_ratios(out, ratios(found))
        if json_file is not None:
            write(json_file, {"shape": shape, "machine": machine()} | report(plan, compared))


def _scheme(
    shop: "Workshop", scheme: str, engines: "Sequence[Engine]", plan: "Plan", kernels: str, binary: "Binary | None"
) -> "Compared":
    """Starts and measures the engines of one scheme; those of another have ended, so that memory holds them all."""
    from drive import measure
    from models import our_model
    from processes import Start
    from tables import Compared, rows

    from runtime.bench.measure import reading_speed

    given = {name: str(getattr(plan, name)) for name in ("context", "prefill", "vocabulary")} | {"kernels": kernels}

    def start(engine: Engine, ours: Path) -> Start:
        return Start(
            name=engine.name,
            module=engine.worker,
            python=shop.peer_python if engine.peer else shop.python,
            options={"model": str(ours if engine is OURS else shop.folder / engine.model)}
            | given
            | (binary.options() if binary and engine.worker == "llama_bench" else {}),
            log=shop.folder / f"{engine.name.replace(' ', '-')}-{scheme}.log",
        )

    shop.say(f"{scheme}: writing our model")
    with our_model(shop, scheme) as ours:
        memory = reading_speed(plan.threads)
        found = measure([start(engine, ours) for engine in engines], plan, memory, shop.say)
    return Compared(scheme, tuple(memory.readings), tuple(found), tuple(rows(scheme, found, plan)))


if __name__ == "__main__":
    app()
