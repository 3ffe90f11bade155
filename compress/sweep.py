"""Many recipes, one model: each is run in a process of its own, and all reports come into one table and one plot.

python -m compress.sweep --recipes nf4,int4-rtn,int8-dynamic --out runs/sweep
python -m compress.sweep --recipes all --out runs/mine --model path/to/model --draft path/to/draft

One process after another: recipes that shared the machine would measure each other. With --ray ADDRESS one on each node
of a Ray cluster. Finished runs are kept, so the same command goes on where it was cut short.
"""

import json
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.errors import USER_ERRORS, UserError
from compress.processes import Launch, Say, all_of, launch
from runtime.cli import without_traceback

if TYPE_CHECKING:
    from compress.recipe import Recipe
    from compress.report.schema import Report
    from compress.report.sweep_table import SweepTable


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
# Options of compress.run that a sweep gives itself.
_OWN = ("--recipe", "--out", "--resume", "--force", "--list", "--show", "--help")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def main(
    context: typer.Context,
    recipes: Annotated[str, typer.Option(help="Built-in recipes or YAML files, with commas between; or: all.")],
    out: Annotated[Path, typer.Option(help="Folder for the table, and for each recipe's run folder.")],
    force: Annotated[bool, typer.Option("--force", help="Do everything again.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster whose nodes take a run each, or local.", show_default="no cluster"),
    ] = None,
) -> None:
    """Runs several recipes one after the other and compares size, quality and speed.

    Every other option goes to each run: see python -m compress.run --help. The same command again goes on after an
    interruption: runs that have finished are kept, one that was cut short is resumed, failed ones are tried again. Exit
    code 1: some recipe failed.
    """
    with without_traceback(USER_ERRORS, stopped="the same command goes on"):
        words, chosen, out = list(context.args), load_recipes(recipes), out.expanduser()
        check_words(words, chosen.values())
        found = _sweep(chosen, out, words, force, ray)
    _print(found)
    typer.echo(f"Table: {out / 'sweep.html'} (also .md, .json), plot: {out / 'pareto.svg'} (also .png)")
    if any(row.failed for row in found.rows):
        raise typer.Exit(1)


def _sweep(
    chosen: "Mapping[str, Recipe]", out: Path, words: Sequence[str], force: bool, address: str | None
) -> "SweepTable":
    def say(line: str) -> None:
        typer.echo(line, err=True)

    if address is None:
        return sweep(chosen, out, words, force, say=say)
    from compress.remote import runs as remote

    with remote.nodes(address, out / remote.NOTES) as nodes:
        return sweep(chosen, out, words, force, say=say, launch=nodes.launch, at_once=nodes.count)


def check_words(words: Sequence[str], recipes: "Iterable[Recipe]" = ()) -> None:
    """Refuses, before the first run, what compress.run would refuse with every recipe.

    Raises UserError for an option that compress.run does not have, that a sweep gives itself, or that is out of its
    range, and typer's own error for words that are no options.
    """
    from typer.main import get_command

    from compress.run import app as run_app
    from compress.run import context_of

    command = get_command(run_app)
    known = {name for parameter in command.params for name in parameter.opts}
    for word in words:
        name = word.partition("=")[0]
        if name in _OWN:
            raise UserError(f"{name}: a sweep gives this option to its runs itself: leave it out")
        if word.startswith("-") and name not in known and not re.fullmatch(r"-\d.*", word):
            raise UserError(
                f"{name}: expected an option of compress.sweep or compress.run, found neither: see python -m "
                "compress.run --help"
            )
    options = command.make_context("compress.run", list(words)).params
    for name in ("recipe", "list_", "show", "resume", "force"):
        del options[name]
    refused: list[Exception] = []
    for recipe in recipes:
        try:
            context_of(recipe, **options)
        except USER_ERRORS as error:
            refused.append(error)
        else:
            return
    if refused:
        raise refused[0]


def load_recipes(names: str) -> "dict[str, Recipe]":
    """The recipes by what names them. Raises UserError for an unknown one, and for two of one name."""
    from compress.recipe import Recipe, built_in

    words = [word.strip() for word in names.split(",") if word.strip()]
    if words == ["all"]:
        words = [recipe.name for recipe in built_in()]
    if not words:
        raise UserError("--recipes: expected names with commas between, found none: name some, or all")
    chosen: dict[str, Recipe] = {}
    for word in dict.fromkeys(words):
        recipe = Recipe.load(word, note=lambda line: typer.echo(f"note: {line}", err=True))
        other = next((w for w, r in chosen.items() if r.name == recipe.name), None)
        if other is not None:
            raise UserError(f"--recipes: {other} and {word} are both called {recipe.name!r}: rename one")
        chosen[word] = recipe
    return chosen


def sweep(
    recipes: "Mapping[str, Recipe]",
    out: Path,
    words: Sequence[str] = (),
    force: bool = False,
    *,
    say: Say = lambda line: None,
    launch: Launch = launch,
    at_once: int = 1,
) -> "SweepTable":
    """Runs what is not done yet, each recipe in `out`/<name>, and writes sweep.{json,md,html} and pareto.{svg,png}.

    recipes  by the word that names each on the command line.
    words    further options of compress.run, the same for all runs.
    at_once  runs beside one another: as many as there are machines.

    A run that fails is in the table with the reason, and the next one follows. The table is written after each run.
    Raises UserError where `out` holds runs of other options or recipes, or reports that cannot be compared.
    """
    from compress.report.sweep_table import sweep_table

    if out.resolve() == Path(out.anchor or "/"):
        raise UserError(f"--out: {out} is the root of all files: give a folder below it")
    command = _shown(["python", "-m", "compress.sweep", "--recipes", ",".join(recipes), "--out", str(out), *words])
    names = [recipe.name for recipe in recipes.values()]
    redo = set(names) if force else _to_redo(out, words)
    results: dict[str, Report | str] = {**_finished(recipes, out, redo)}
    out.mkdir(parents=True, exist_ok=True)

    def write() -> "SweepTable":
        found = sweep_table(command, {name: results[name] for name in names if name in results})
        _write(found, out, {"options": _shown(words), "redo": sorted(redo)})
        return found

    # On disk before the first run: whatever is in `out` from now on was made with these words, or is to be redone.
    found = write()
    work = []
    for word, recipe in recipes.items():
        name = recipe.name
        if name in results:
            say(f"{name}: done before")
        else:
            work.append((name, partial(_run, word, name, out, words, name in redo, say, launch)))
    for name, result in all_of(work, at_once):
        results[name] = result
        redo.discard(name)
        found = write()
    return found


def _run(
    word: str, name: str, out: Path, words: Sequence[str], force: bool, say: Say, launch: Launch
) -> "Report | str":
    """The run's report, or why there is none."""
    from compress.report.files import read_report

    folder = out / name
    resume = not force and folder.with_name(f"{name}.partial").exists()
    extra = ["--force"] if force else ["--resume"] if resume else []
    command = [sys.executable, "-m", "compress.run", "--recipe", word, "--out", str(folder), *words, *extra]
    say(f"{name}: {'resumed' if resume else 'started'}")
    ended = launch(command, out / f"{name}.log", lambda line: say(f"  {line}"))
    if ended.code == 0:
        return read_report(folder)
    if ended.code == 130:
        raise KeyboardInterrupt
    how = f"ended by signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    say(f"{name}: failed ({how})")
    told = ended.error.startswith("error: ")
    # Only the last part of absolute paths.
    bare = re.sub(r"(?<![\w.])(?:/[^\s/:,;()]+)+/", "", ended.error.removeprefix("error: "))
    return bare if told else f"{how}: see {name}.log"


def _to_redo(out: Path, words: Sequence[str]) -> set[str]:
    """Recipes that an earlier --force was to do again and did not come to.

    Raises UserError where `out` holds a sweep with other options, or one whose table cannot be read.
    """
    file = out / "sweep.json"
    if not file.is_file():
        return set()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        before, redo = str(content["options"]), set(map(str, content["redo"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}): do everything again with --force") from error
    if before != _shown(words):
        raise UserError(
            f"{out} holds a sweep with the options {before or 'none'!r}, found {_shown(words) or 'none'!r}: take the "
            "same, choose another --out, or do everything again with --force"
        )
    return redo


def _finished(recipes: "Mapping[str, Recipe]", out: Path, redo: Collection[str]) -> "dict[str, Report]":
    """Reports of runs that are done. Raises UserError where what they did is not what is asked for now."""
    from compress.report.files import read_report
    from compress.report.scrub import without_directories

    reports: dict[str, Report] = {}
    for recipe in recipes.values():
        folder = out / recipe.name
        if recipe.name in redo or not (folder / "report.json").is_file():
            continue
        if not (out / "sweep.json").is_file():
            raise UserError(f"{folder} was not made by a sweep: choose another --out, or replace it with --force")
        reports[recipe.name] = read_report(folder)
        asked = reports[recipe.name].asked.recipe
        if {**asked, "about": ""} != {**without_directories(recipe.to_dict()), "about": ""}:
            raise UserError(
                f"{folder} was made by another version of the recipe {recipe.name}: delete the folder, or do "
                "everything again with --force"
            )
    return reports


def _write(found: "SweepTable", out: Path, state: Mapping[str, Any]) -> None:
    """Writes the table of what there is by now, and what the same command goes on from."""
    from compress.artifact.files import write_atomic, write_json
    from compress.report import sweep_page
    from compress.report.figure import png, svg
    from compress.report.sweep_plot import pareto

    figure, plot = pareto(found), None
    if figure is not None:
        plot = svg(figure)
        write_atomic(out / "pareto.svg", plot)
        write_atomic(out / "pareto.png", png(figure))
    write_atomic(out / "sweep.md", sweep_page.markdown(found).encode())
    write_atomic(out / "sweep.html", sweep_page.html(found, plot).encode())
    write_json(out / "sweep.json", {**found.to_dict(), **state})


def _print(found: "SweepTable") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from compress.report.sweep_page import cells

    table = Table(box=box.SIMPLE)
    shown = {0: "weights", 2: "bits per weight", 5: "perplexity", 6: "KL, nats", 8: "verdict", 10: "speed"}
    table.add_column("recipe")
    for header in shown.values():
        table.add_column(header, justify="right")
    table.add_column("")
    for row in found.rows:
        figures, beaten = cells(row), ", ".join(row.dominated_by)
        remark = f"dominated by {beaten}" if beaten else f"failed: {row.failed}" if row.failed else ""
        table.add_row(row.recipe, *(figures[i] for i in shown), remark, style="dim" if beaten else None)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140).print(table)


def _shown(words: Sequence[str]) -> str:
    """The words as one line, without the directories that they name outside of this one."""
    from compress.report.scrub import scrub_command

    here = f"{Path.cwd()}/"
    # A list of recipes is several paths in one word.
    parts = (",".join(scrub_command(shlex.quote(part)) for part in word.replace(here, "").split(",")) for word in words)
    return " ".join(parts)


if __name__ == "__main__":
    app()
