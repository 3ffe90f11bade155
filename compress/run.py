"""The command that does the whole job: a recipe and a model become an artifact with its report.

python -m compress.run --recipe nf4
python -m compress.run --list
"""

import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.context import RunContext
from compress.errors import USER_ERRORS, UserError
from runtime.checkpoints.locate import here
from runtime.cli import without_traceback

if TYPE_CHECKING:
    from rich.table import Table

    from compress.recipe import Recipe
    from compress.report.schema import Report

# Fields of RunContext that a command to repeat the run does not have.
_UNSHOWN = ("recipe", "resume", "force", "shard_bytes", "command", "progress", "note")
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Option(help="Built-in recipe (see --list) or a YAML file.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model directory or hub name.", show_default="the embedded pair's target")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Draft model: directory, hub name, or none.",
            show_default="the embedded pair's with the embedded pair, else none: prompt lookup drafts",
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Run folder.", show_default="runs/<recipe>")] = None,
    calib: Annotated[
        str | None,
        typer.Option(
            help="Text to calibrate and measure on: file, directory or datasets name.",
            show_default="this Python's standard library, held-out files",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Calibration windows.", show_default=str(RunContext.samples))
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a window.", show_default=str(RunContext.seq_len))
    ] = None,
    eval_tokens: Annotated[
        int, typer.Option(help="Tokens to measure quality on; 0: measure none.")
    ] = RunContext.eval_tokens,
    choices: Annotated[
        int, typer.Option(help="Choices of the next line to measure quality on; 0: none.")
    ] = RunContext.choices,
    long_context: Annotated[
        int, typer.Option(help="Tokens of long contexts to measure quality on, at most the models'; 0: none.")
    ] = RunContext.long_context,
    tasks: Annotated[str, typer.Option(help="Tasks of lm-eval for both models, by commas (extra eval).")] = "",
    task_folder: Annotated[
        str | None, typer.Option(help="Folder with task YAML files of your own.", show_default="lm-eval's tasks alone")
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens per prompt when measuring speed.")] = RunContext.new_tokens,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Prompts to measure speed on: a text or .jsonl file, Spec-Bench's by task group.",
            show_default="beginnings of functions and paragraphs of the text",
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="The only drafter to time; none: plain decoding alone.", show_default="all that the run has"),
    ] = None,
    draft_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens that every drafter proposes a round.", show_default="what pays most, chosen every round"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = RunContext.device,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = RunContext.seed,
    memory_budget: Annotated[
        str | None, typer.Option(help="Memory for the work on the weights, such as 4GB.", show_default="what is free")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Time for each stage that trains.", show_default="the recipe's")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens for each stage that trains.", show_default="the recipe's")
    ] = None,
    export: Annotated[
        str, typer.Option(help="Forms for other engines, by commas: gptq, awq, … (python -m compress.export).")
    ] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was cut short.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an older run in --out.")] = False,
    no_speed: Annotated[bool, typer.Option("--no-speed", help="Measure no speed.")] = False,
    baselines: Annotated[
        str, typer.Option(help="Rows of transformers' own speed in the report: none, eager or all.")
    ] = RunContext.baselines,
    list_: Annotated[bool, typer.Option("--list", help="List the built-in recipes and stop.")] = False,
    show: Annotated[
        str | None, typer.Option(help="Print this recipe's YAML, to start one of your own from, and stop.")
    ] = None,
) -> None:
    """Compresses a model by a recipe, pairs it with a draft, measures size, quality and speed, writes the report."""
    # Ctrl-C counts from the first import on: they take seconds.
    with without_traceback(USER_ERRORS):
        _main(**context.params)


def _main(
    recipe: str | None,
    list_: bool,
    show: str | None,
    export: str,
    memory_budget: str | None,
    no_speed: bool,
    **options: Any,
) -> None:
    """`options`: the fields of RunContext that are as the command line has them."""
    from compress.recipe import Recipe, built_in, text_of

    if show is not None:
        typer.echo(text_of(show), nl=False)
        return
    if list_:
        for known in built_in():
            typer.echo(f"{known.name:<21}{known.about}")
        return
    if recipe is None:
        raise UserError(f"--recipe: expected a recipe ({', '.join(r.name for r in built_in())}), found none: name one")
    chosen = Recipe.load(recipe, note=lambda line: typer.echo(f"note: {line}", err=True))
    if options["model"] is not None:
        here(options["model"])
    context = context_of(chosen, export, memory_budget, no_speed, **options)
    from rich.console import Console
    from transformers.utils import logging

    from compress.pipeline import run
    from compress.progress import show as shown
    from compress.report.files import read_report
    from compress.training.parallel import follows

    # Advice that is not about this run; errors still show.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with shown() as progress:
        command = command_line(recipe, context)
        artifact = run(replace(context, command=command, progress=progress, note=progress.note))
    if not follows():
        folder = artifact.path
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100)
        report = read_report(folder)
        console.print(*summary_tables(report))
        where = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
        typer.echo(f"Report: {where / 'report.html'} (also .md, .json)")


def context_of(recipe: "Recipe", export: str, memory_budget: str | None, no_speed: bool, **options: Any) -> RunContext:
    """The context of options as the command line has them. Raises UserError for the first that cannot be."""
    from compress.export import names_in
    from compress.pipeline.forecast import parse_size

    options["export"] = tuple(names_in(export))
    options["tasks"] = tuple(name.strip() for name in options["tasks"].split(",") if name.strip())
    options["memory_budget"] = None if memory_budget is None else parse_size(memory_budget)
    return RunContext.of(recipe, speed=not no_speed, **options)


def command_line(recipe: str, context: RunContext) -> str:
    """The command that gives this run again, without paths from outside the current directory; `recipe` names it."""
    words, plain = ["python", "-m", "compress.run", "--recipe", _shown(recipe)], RunContext.of(context.recipe)
    for name in (one.name for one in fields(RunContext) if one.name not in _UNSHOWN):
        value = getattr(context, name)
        if value == getattr(plain, name):
            continue
        if name == "speed":
            words.append("--no-speed")
        else:
            shown = ",".join(value) if isinstance(value, tuple) else _shown(value)
            words += ["--" + name.replace("_", "-"), shown]
    return shlex.join(words)


def _shown(value: Any) -> str:
    path = Path(str(value))
    if not path.is_absolute():
        return str(value)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def summary_tables(report: "Report") -> list["Table"]:
    """The summary for a terminal: the figures, and every drafter that was timed."""
    from rich import box
    from rich.table import Table

    from compress.report.sections_speed import pairings

    table = Table(box=box.SIMPLE, show_header=False)
    for label, text in summary_rows(report):
        table.add_row(label, text)
    if not report.speed.pairings:
        return [table]
    found = pairings(report)
    drafters = Table(box=box.SIMPLE)
    for header in found.headers:
        drafters.add_column(header, justify="left" if header == found.headers[0] else "right")
    for row in found.rows:
        drafters.add_row(*row)
    return [table, drafters]


def summary_rows(report: "Report") -> list[tuple[str, str]]:
    """Label and text of each line of the summary."""
    from compress.report.verdict_words import choices, interval, short
    from compress.report.wording import NO_GAIN, megabytes, number, times

    verdict, flips = report.quality.verdict, report.quality.flips
    size, perplexity, speed = report.size, report.quality.perplexity, report.speed
    ways = (speed.original, speed.compressed, speed.speculative)
    sizes = f"{megabytes(size.original_bytes)} -> {megabytes(size.compressed_bytes)}"
    gain = speed.speedup.over_compressed if speed.speedup else None
    fastest = NO_GAIN if not speed.pays else f"drafter {speed.drafter}, {times(gain or 0.0)} plain decoding"
    return [
        ("size", f"{sizes} ({size.ratio:.2f} x smaller)"),
        ("bits per quantised weight", number(size.bits_per_weight, 3)),
        ("perplexity", f"{number(perplexity.original, 3)} -> {number(perplexity.compressed, 3)}"),
        *([] if verdict is None else [("verdict", f"{short(verdict)} ({interval(verdict)})")]),
        *([] if flips is None else [("choices of the next line", choices(flips))]),
        (
            "tokens/s: original / compressed / speculative",
            " / ".join(number(way.tokens_per_second if way else None, 1) for way in ways),
        ),
        *([] if speed.drafter is None else [("fastest way", fastest)]),
        ("acceptance rate α", number(speed.acceptance_rate, 3)),
    ]


if __name__ == "__main__":
    app()
