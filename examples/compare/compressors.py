"""Our compressors against GPTQModel and llm-compressor: same model, same token windows, same settings, one evaluator.

    make compressors
    .venv/bin/python examples/compare/compressors.py            # quality, on the embedded pair's target
    .venv/bin/python examples/compare/compressors.py --time     # time, on TinyLlama's shape, random weights

Each compression is a process of its own; only one computes at any moment.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from models import interpreters
from settings import SETTINGS, TIMED, Setting, chosen

from compress.errors import USER_ERRORS
from runtime.bench.options import say, writable
from runtime.cli import takes, without_traceback
from runtime.errors import UserError

if TYPE_CHECKING:
    from calibration import Text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Options:
    """What the command is asked for."""

    setting: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{SETTINGS[0].name}, 'gptq-3-*' and the like; may be repeated.",
            show_default=f"all; with --time {', '.join(TIMED)}",
        ),
    ] = None
    time: Annotated[bool, typer.Option("--time", help="Measure time on --shape instead of quality on the pair.")] = (
        False
    )
    peers_only: Annotated[bool, typer.Option("--peers-only", help="Leave ours out.")] = False
    source: Annotated[str, typer.Option(help="Text: stdlib, a file, a directory, or a dataset.")] = "stdlib"
    samples: Annotated[int, typer.Option(help="Windows to calibrate on.", min=1)] = 64
    seq_len: Annotated[int, typer.Option(help="Tokens in a window.", min=8)] = 512
    eval_tokens: Annotated[int, typer.Option(help="Held-out tokens that results are evaluated on.", min=16)] = 98_304
    seed: Annotated[int, typer.Option(help="Which windows.", min=0)] = 0
    shape: Annotated[str, typer.Option(help="With --time: a shape of runtime.bench.")] = "tinyllama-1.1b"
    blocks: Annotated[
        int | None, typer.Option(help="With --time: only the shape's first ones.", show_default="all", min=1)
    ] = None
    rounds: Annotated[int, typer.Option(help="With --time: turns of every compressor.", min=1)] = 3
    threads: Annotated[int | None, typer.Option(help="Of everybody.", show_default="physical cores", min=1)] = None
    peer_python: Annotated[Path, typer.Option(help="The peers' environment.")] = Path(".compressors/bin/python")
    work: Annotated[Path, typer.Option(help="Where checkpoints and logs are kept.")] = Path("runs/compressors")
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None

    @property
    def text(self) -> "Text":
        """Which windows."""
        from calibration import Text

        return Text(self.source, self.samples, self.seq_len, self.eval_tokens, self.seed)


@app.command()
@takes(Options)
def main(options: Options) -> None:
    """Compresses one model with everybody and prints excess log-perplexity, or time, and ratios."""
    with without_traceback(USER_ERRORS):
        settings = chosen(options.setting, TIMED if options.time else ("*",))
        pythons = interpreters(options.peer_python, "compressors")
        writable("--json", options.json_file)
        content = (_time if options.time else _quality)(options, settings, pythons)
        if options.json_file is not None:
            from runtime.bench.measure import machine
            from runtime.bench.output import write

            write(options.json_file, {"machine": machine()} | content)


def _quality(options: Options, settings: list[Setting], pythons: tuple[Path, Path]) -> dict[str, Any]:
    """Makes the checkpoints, evaluates them and prints the table; returns the JSON file's content."""
    # Imported here: torch takes longer to load than `--help` may take.
    import calibration
    import compressor_tables as tables
    import excess
    import saved
    import torch
    from jobs import Bench, wanted

    from compress.model.source import default_pair
    from runtime.bench.output import console
    from runtime.native import default_threads

    model, count = Path(default_pair()[0]).absolute(), options.threads or default_threads()
    text, work = options.text, options.work.absolute()
    torch.set_num_threads(count)
    drawn = calibration.draw(text, model)
    work.mkdir(parents=True, exist_ok=True)
    windows = calibration.write(drawn.calibration, work)
    folder = work / f"pair-{windows.stem.removeprefix('windows-')}"
    bench = Bench(model, windows, asdict(text), *pythons, count, folder / "logs")
    jobs = wanted(settings, options.peers_only)
    taken = saved.make(bench, folder, jobs, say)
    places = [saved.place(folder, setting, name) for setting, name in jobs]
    found = excess.evaluate(model, places, drawn.evaluation, say)
    scores = {(setting.name, name): one for (setting, name), one in zip(jobs, found, strict=True)}
    rows = tables.quality_rows(settings, scores)
    out = console(160)
    out.print(
        f"the embedded pair's target; {drawn.corpus}: {tuple(drawn.calibration.shape)} tokens to calibrate on,"
        f" {tuple(drawn.evaluation.shape)} to evaluate on; float32 evaluation of dense weights\n",
        soft_wrap=True,
    )
    tables.print_quality(out, rows)
    about = {"model": "pair", "text": calibration.facts(text, drawn, windows), "threads": count}
    return about | tables.report(rows, taken, settings)


def _time(options: Options, settings: list[Setting], pythons: tuple[Path, Path]) -> dict[str, Any]:
    """Measures in turn and prints the table; returns the JSON file's content."""
    import calibration
    import compressor_tables as tables
    import timed
    from jobs import Bench

    from compress.model.source import default_pair
    from runtime.bench.measure import machine
    from runtime.bench.output import console
    from runtime.bench.shapes import SHAPES
    from runtime.native import default_threads

    text, shape, blocks, rounds = options.text, options.shape, options.blocks, options.rounds
    if shape not in SHAPES:
        raise UserError(f"--shape: expected one of {', '.join(SHAPES)}, found {shape!r}")
    if blocks is not None and blocks > SHAPES[shape].architecture.layers:
        raise UserError(f"--blocks: {shape} has {SHAPES[shape].architecture.layers}, found {blocks}")
    count, folder = options.threads or default_threads(), options.work.absolute() / shape
    say(f"writing {shape} with random weights (removed at the end)")
    with timed.random_checkpoint(shape, blocks, Path(default_pair()[0]), folder) as model:
        drawn = calibration.draw(text, model)
        windows = calibration.write(drawn.calibration, folder)
        bench = Bench(model, windows, asdict(text), *pythons, count, folder / "logs")
        taken = timed.measure(bench, settings, rounds, options.peers_only, say)
    out = console(160)
    out.print(
        f"{shape}, {blocks or 'all'} blocks, random weights (time only); {machine()['cpu']}, {count} threads;"
        f" {tuple(drawn.calibration.shape)} tokens; {rounds} interleaved rounds\n",
        soft_wrap=True,
    )
    tables.print_times(out, tables.time_rows(taken), tables.time_ratios(taken))
    about = {"model": shape, "blocks": blocks, "text": calibration.facts(text, drawn, windows), "threads": count}
    return about | tables.report([], taken, settings)


if __name__ == "__main__":
    app()
