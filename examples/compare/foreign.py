"""Checkpoints that GPTQModel and llm-compressor wrote: decoded with their own kernels, and the same files on ours.

    make compressors
    .venv/bin/python examples/compare/foreign.py            # TinyLlama's shape, random weights: minutes to compress

Each checkpoint is written by its library, on a few short windows since its text means nothing, and decoded as it is by
transformers with that library's kernels and by Specpress, in turns; only one process computes at any moment.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from models import interpreters
from settings import TIMED, Setting, chosen

from compress.errors import USER_ERRORS
from runtime.bench.options import say, writable
from runtime.cli import takes, without_traceback
from runtime.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Row:
    """One checkpoint: milliseconds a token (the prompt's time among them) in its library and here, medians of rounds.

    library, kernels  who wrote it, and the layers that run it in transformers.
    ratio             theirs over ours, the median over the rounds: above 1, ours is the faster.
    """

    setting: str
    library: str
    kernels: str
    precision: str
    their_ms: float
    our_ms: float
    ratio: float


@dataclass(frozen=True)
class Options:
    """What the command is asked for."""

    setting: Annotated[list[str] | None, typer.Option(help="Which checkpoints.", show_default=", ".join(TIMED))] = None
    shape: Annotated[str, typer.Option(help="A shape of runtime.bench.")] = "tinyllama-1.1b"
    blocks: Annotated[int | None, typer.Option(help="Only the first ones.", show_default="all", min=1)] = None
    new_tokens: Annotated[int, typer.Option(help="Of each text.", min=1)] = 48
    prompts: Annotated[int, typer.Option(help="Texts, 16 tokens of prompt each.", min=1)] = 2
    rounds: Annotated[int, typer.Option(help="Turns of everybody.", min=1)] = 3
    samples: Annotated[int, typer.Option(help="Windows of 128 tokens that the libraries calibrate on.", min=1)] = 2
    threads: Annotated[int | None, typer.Option(help="Of everybody.", show_default="physical cores", min=1)] = None
    peer_python: Annotated[Path, typer.Option(help="The libraries' environment.")] = Path(".compressors/bin/python")
    work: Annotated[Path, typer.Option(help="Where logs are kept.")] = Path("runs/foreign")
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None


@app.command()
@takes(Options)
def main(options: Options) -> None:
    """Writes the checkpoints, decodes each in both, and prints milliseconds a token and their ratio."""
    with without_traceback(USER_ERRORS):
        settings = chosen(options.setting, TIMED)
        for one in settings:
            if one.method not in ("gptq", "awq"):
                raise UserError(f"--setting: expected packed weights (gptq or awq), found {one.name}")
        pythons = interpreters(options.peer_python, "compressors")
        writable("--json", options.json_file)
        rows = _compare(options, settings, pythons)
        if options.json_file is not None:
            from runtime.bench.measure import machine
            from runtime.bench.output import write

            about = {"model": options.shape} | {
                key: getattr(options, key) for key in ("blocks", "new_tokens", "rounds")
            }
            write(options.json_file, {"machine": machine()} | about | {"rows": [asdict(row) for row in rows]})


def _compare(options: Options, settings: list[Setting], pythons: tuple[Path, Path]) -> list[Row]:
    import calibration
    import jobs
    import timed
    import torch
    from rounds import Work

    from compress.model.source import default_pair
    from runtime.bench.measure import machine
    from runtime.bench.shapes import SHAPES
    from runtime.native import default_threads

    shape, blocks = options.shape, options.blocks
    if shape not in SHAPES:
        raise UserError(f"--shape: expected one of {', '.join(SHAPES)}, found {shape!r}")
    count, folder = options.threads or default_threads(), options.work.absolute() / shape
    text = calibration.Text("stdlib", options.samples, 128, 128, 0)
    drawn = torch.randint(3, 1000, (options.prompts, 16), generator=torch.Generator().manual_seed(0))
    doing = Work(drawn.tolist(), options.new_tokens, options.rounds, count)
    rows = []
    say(f"writing {shape} with random weights (removed at the end)")
    with timed.random_checkpoint(shape, blocks, Path(default_pair()[0]), folder) as model:
        windows = calibration.write(calibration.draw(text, model).calibration, folder)
        bench = jobs.Bench(model, windows, asdict(text), *pythons, count, folder / "logs")
        for setting in settings:
            out = model.parent / setting.name
            say(f"{setting.peer} writes {setting.name}")
            jobs.run(bench, setting, setting.peer, out)
            # Not every library writes the tokenizer, which decoding asks for even where prompts are ids.
            for name in ("tokenizer.json", "tokenizer_config.json"):
                if not (out / name).exists():
                    shutil.copyfile(model / name, out / name)
            rows.append(_row(setting, out, doing, pythons, folder / "logs", say))
    where = f"{machine()['cpu']}, {count} threads"
    _print(rows, f"{shape}, {blocks or 'all'} blocks, random weights; {where}; {options.rounds} rounds")
    return rows


def _row(setting: Setting, out: Path, doing: Any, pythons: tuple[Path, Path], logs: Path, say: Any) -> Row:
    from processes import Start
    from rounds import decode
    from ways import OURS, Way

    options = {"target": str(out), "draft": str(out), "drafter": "none", "positions": "512"}
    starts = []
    for engine, worker, python in (
        (OURS, "specpress_generate", pythons[0]),
        ("transformers", "transformers_packed", pythons[1]),
    ):
        start = Start(engine, worker, python, options, logs / f"{setting.name}.{engine}.log")
        starts.append((start, [Way(engine, worker, python == pythons[1], "none")]))
    ours, theirs = decode(starts, doing, say)
    tokens = doing.new_tokens * len(doing.prompts)
    our_ms, their_ms = ([1e3 * turn.seconds / tokens for turn in one.turns] for one in (ours, theirs))
    return Row(
        setting.name,
        setting.peer,
        theirs.facts["layers"],
        theirs.facts["precision"],
        median(their_ms),
        median(our_ms),
        median(a / b for a, b in zip(their_ms, our_ms, strict=True)),
    )


def _print(rows: list[Row], title: str) -> None:
    from runtime.bench.output import console, table

    columns = [
        ("setting", "checkpoint", "s"), ("library", "written by", "s"),
        ("layers", "its layers in transformers", "s"), ("their_ms", "ms a token there", ".1f"),
        ("our_ms", "here", ".1f"), ("ratio", "times as fast", ".2f"),
    ]  # fmt: skip
    layers = [f"{row.kernels.rpartition('.')[2]}, {row.precision}" for row in rows]
    out = console(160)
    out.print(title + "\n", soft_wrap=True)
    out.print(table(columns, [vars(row) | {"layers": layer} for row, layer in zip(rows, layers, strict=True)]))


if __name__ == "__main__":
    app()
