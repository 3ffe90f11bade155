"""The command `specpress`: one door to every command. Each is imported when it is called, not before."""

import platform
from importlib import import_module, metadata
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from runtime.cli import interrupts_wait_for_imports


class Entry(NamedTuple):
    """Where a command is (module, and its typer app or its function) and what it is for, in a line of the help."""

    module: str
    attribute: str
    about: str


COMMANDS = {
    "compress": Entry("compress.run", "app", "Compress a model by a recipe, and write its report."),
    "generate": Entry("runtime.generate", "app", "Continue a prompt, speculatively."),
    "chat": Entry("runtime.chat", "app", "Talk with a model in the terminal."),
    "serve": Entry("runtime.serve.command", "app", "Serve models by OpenAI's HTTP interface."),
    "cluster": Entry("runtime.serve.ray_command", "app", "Serve a model by replicas on a Ray cluster."),
    "bench": Entry("runtime.bench.__main__", "app", "Measure kernels, decoding and speculation."),
    "best": Entry("compress.best.__main__", "app", "Find the best bits and drafter under a budget."),
    "sweep": Entry("compress.sweep", "app", "Run several recipes, and compare them in one table."),
    "export": Entry("compress.export.__main__", "app", "Write a run in other engines' formats."),
    "check": Entry("compress.check.__main__", "app", "Check a compressed model, whoever wrote it."),
    "report": Entry("specpress.report", "command", "Show the report of a run."),
    "push": Entry("specpress.push", "command", "Upload a run to the Hugging Face hub, with a model card."),
    "audit": Entry("runtime.audit.__main__", "app", "Audit an engine whose speculation is called lossless."),
    "models": Entry("runtime.models.__main__", "app", "Show how each architecture of transformers runs here."),
    "prompts": Entry("calib.__main__", "cut_prompts", "Cut prompts out of a text, for bench."),
}
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "bitsandbytes", "onnxruntime")


class LazyGroup(TyperGroup):
    """Lists its commands by name and a line each; the command itself is imported when it is chosen."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, entry in COMMANDS.items():
            self.add_command(TyperCommand(name, help=entry.about))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """(name, command, further arguments) of what was typed."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load_command(name or args[0]), rest


def load_command(name: str) -> Any:
    """The command of this name, imported."""
    entry = COMMANDS[name]
    found = getattr(import_module(entry.module), entry.attribute)
    if isinstance(found, typer.Typer):
        return get_command(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command()(found)
    return get_command(alone)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _versions(context: typer.Context, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    found = {"specpress": "not installed", "python": platform.python_version()}
    for package in ("specpress", *_PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    for name, version in found.items():
        typer.echo(f"{name:<14}{version}")
    raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_versions, is_eager=True, help="Show versions and stop.")
    ] = False,
) -> None:
    """Makes a causal language model smaller, decodes it speculatively, and reports size, quality and speed."""


def main() -> None:
    """Runs the command line; `python -m specpress` completes and helps under the same name."""
    with interrupts_wait_for_imports():
        app(prog_name="specpress")
