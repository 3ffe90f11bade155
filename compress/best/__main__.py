"""The command that plans: the best bits and drafter under a budget, compressed and measured for real.

python -m compress.best --model path/to/model --quality 1% --disk 2GB
python -m compress.best --model path/to/model --quality 1% --for size --out runs/small
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from compress.context import RunContext
from compress.errors import USER_ERRORS, UserError
from runtime.checkpoints.locate import here
from runtime.cli import without_traceback

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Model directory or hub name.", show_default="the embedded pair's target")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Draft model: directory, hub name, or none.", show_default="the embedded pair's with it, else none"
        ),
    ] = None,
    out: Annotated[str, typer.Option(help="Folder for the plan, with the run in best/.")] = "runs/best",
    quality: Annotated[
        str | None, typer.Option(help="Most growth of perplexity, such as 1%: its 95 % interval's upper end.")
    ] = None,
    kl: Annotated[float | None, typer.Option(help="Most mean KL(original || compressed), nats a token.")] = None,
    disk: Annotated[str | None, typer.Option(help="Most bytes of the model's files, such as 2GB.")] = None,
    memory: Annotated[str | None, typer.Option(help="Most memory of weights, keys and values, and the draft.")] = None,
    latency: Annotated[float | None, typer.Option(help="Most milliseconds a token while decoding.")] = None,
    ttft: Annotated[float | None, typer.Option(help="Most milliseconds to the first token of a prompt.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt that --ttft is about.", min=1)] = 512,
    goal: Annotated[str, typer.Option("--for", help="What is to be best: speed, size or quality.")] = "speed",
    minutes: Annotated[float, typer.Option(help="About how long it may take.", min=0.1)] = 10.0,
    candidates: Annotated[int, typer.Option(help="Models within the budgets that are timed.", min=1, max=16)] = 3,
    tokens: Annotated[int, typer.Option("--context", help="Tokens in the cache that --memory counts.", min=1)] = 512,
    batch: Annotated[int, typer.Option(help="Requests at once that --memory counts.", min=1)] = 1,
    calib: Annotated[
        str | None,
        typer.Option(
            help="Text to calibrate and measure on: file, directory or datasets name.",
            show_default="this Python's standard library, held-out files",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Calibration windows.")] = RunContext.samples,
    seq_len: Annotated[int, typer.Option(help="Tokens in a window.")] = RunContext.seq_len,
    eval_tokens: Annotated[int, typer.Option(help="Tokens to measure quality on.")] = RunContext.eval_tokens,
    new_tokens: Annotated[int, typer.Option(help="Tokens per prompt when measuring speed.")] = RunContext.new_tokens,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = RunContext.seed,
    force: Annotated[bool, typer.Option("--force", help="Replace an older plan in --out.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster that compresses candidates, or local.", show_default="no cluster"),
    ] = None,
) -> None:
    """Finds the bits of each layer and the drafter that are best within budgets, and compresses the model so.

    The best few choices are compressed and measured for real, and measured figures decide. The same command again goes
    on where it was cut short.
    """
    with without_traceback(USER_ERRORS, stopped="the same command goes on"):
        _main(**context.params)


def _main(
    out: str,
    quality: str | None,
    kl: float | None,
    disk: str | None,
    memory: str | None,
    latency: float | None,
    ttft: float | None,
    prompt_tokens: int,
    goal: str,
    minutes: float,
    candidates: int,
    tokens: int,
    batch: int,
    force: bool,
    ray: str | None,
    **options: str | int | None,
) -> None:
    """`options`: fields of RunContext by name."""
    if isinstance(options["model"], str):
        here(options["model"])
    from dataclasses import replace

    from compress.best.budgets import Budgets

    budgets = Budgets.parse(quality, kl, disk, memory, latency, ttft, goal)
    from compress.recipe import Recipe

    # Every candidate has a recipe of its own; this one stands for the options.
    context = RunContext.of(Recipe.load("int8-dynamic"), out=Path(out).expanduser(), **options)
    if not context.eval_tokens:
        raise UserError("--eval-tokens: expected 1 or more, found 0: measured quality decides")
    from transformers.utils import logging

    from compress.best.question import Question
    from compress.best.start import make_plan
    from compress.progress import show

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with show() as progress:
        context = replace(context, progress=progress, note=progress.note)
        asked = Question(context, budgets, candidates, minutes, tokens, batch, prompt_tokens)
        if ray is None:
            folder = make_plan(asked, force)
        else:
            from compress.remote import runs as remote

            with remote.nodes(ray, context.folder.with_name(f"{context.folder.name}.{remote.NOTES}")) as nodes:
                folder = make_plan(asked, force, nodes)
    text = (folder / "plan.md").read_text(encoding="utf-8").split("\n## Bits")[0]
    print(text, file=sys.stdout)
    where = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    typer.echo(f"Plan: {where / 'plan.md'} (also .html, .json), run: {where / 'best'}")


if __name__ == "__main__":
    app()
