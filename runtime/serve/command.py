"""`python -m runtime.serve` and `specpress serve`: what can be said on the command line, checked."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from runtime.checkpoints.locate import here
from runtime.cli import takes
from runtime.errors import UserError
from runtime.serve.settings import Access, Limits, ModelSettings, PageSettings

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
ORIGINAL = "original"  # what --original is called
_GENERIC = ("model",)  # folder names that say nothing: then the run folder above is the name


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Of `serve`."""

    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET",
            help="Run folders, model directories, GGUF files or hub names, one engine each; as NAME=PATH under a name"
            " of its own.",
            show_default=False,
        ),
    ] = None
    target: Annotated[list[str] | None, typer.Option(help="The same as an option. Repeatable.", show_default=False)] = (
        None
    )
    draft: Annotated[
        str | None,
        typer.Option(
            help="The first target's draft, Medusa heads, block or another head.", show_default="the run's own"
        ),
    ] = None
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Who proposes tokens where a request names nobody; a plus: the second where the first finds nothing;"
            " a comma, or auto: who gains most, by text.",
            show_default="the fastest by the run's report; without one block where the run has one, model where"
            " there is a draft, else medusa, else lookup",
        ),
    ] = None
    corpus: Annotated[Path | None, typer.Option(help="For the drafter suffix: a text file.")] = None
    draft_length: Annotated[
        int | None,
        typer.Option(min=0, max=64, help="Tokens drafted a round.", show_default="what pays most, chosen every round"),
    ] = None
    host: Annotated[str, typer.Option(help="Address to listen on; another than loopback needs --api-key-file.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8000
    api_key_file: Annotated[Path | None, typer.Option(help="Keys, one a line: requests must bring one of them.")] = None
    admin_key_file: Annotated[
        Path | None, typer.Option(help="The same for /admin.", show_default="/admin is for this machine alone")
    ] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without a key.")] = False
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name that clients may call this host by. Repeatable.")
    ] = None
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Pages of this origin may read answers. Repeatable.")
    ] = None
    max_batch: Annotated[int, typer.Option(min=1, max=4096, help="Texts in one forward; others wait.")] = 32
    max_queued: Annotated[int, typer.Option(min=0, help="Texts that may wait; beyond: 429.")] = 256
    max_queued_tokens: Annotated[int, typer.Option(min=1, help="Tokens of prompts that may wait.")] = 1_000_000
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a request.")] = 8_000_000
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and answer.", show_default="the model's positions")
    ] = None
    pages: Annotated[
        int | None,
        typer.Option(min=1, help="Pages of 64 tokens for keys and values.", show_default="a quarter of free memory"),
    ] = None
    kv: Annotated[str, typer.Option(help="Keys and values: auto, float32, float16 (GPUs), int8, int4 or int3.")] = (
        "auto"
    )
    states: Annotated[
        str,
        typer.Option(help="States of delta nets, state spaces and convolutions: float32, float16 or, on CPUs, int8."),
    ] = "float32"
    runs: Annotated[
        Path | None, typer.Option(help="A folder of runs and sweeps, which the page lists.", show_default=False)
    ] = None
    original: Annotated[
        str | None,
        typer.Option(
            help="The model before it was compressed, served beside it as `original`: the page compares the two.",
            show_default=False,
        ),
    ] = None
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja file in place of the tokenizer's own.")] = None
    drain: Annotated[float, typer.Option(min=0, help="Seconds that running texts have at SIGTERM.")] = 30.0
    stall: Annotated[float, typer.Option(min=2, help="Seconds of an engine's silence before it is restarted.")] = 10.0
    lenient: Annotated[bool, typer.Option("--lenient", help="Ignore fields that are not known.")] = False
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu"
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")] = None
    kernels: Annotated[str, typer.Option(help="auto, or a set of kernels by name.")] = "auto"


@takes(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serves models by OpenAI's HTTP interface. A text depends on its request alone, never on what else is asked.

    Stop it with Ctrl-C or SIGTERM: running texts end first. See docs/serve.md.
    """
    require_packages()
    models = model_settings(options)
    for one in models:
        here(one.path)
    from runtime.serve.guard import is_loopback, read_keys
    from runtime.serve.server import run
    from runtime.serve.vocabulary import read_template

    access = Access(
        options.host,
        options.port,
        read_keys("--api-key-file", options.api_key_file),
        read_keys("--admin-key-file", options.admin_key_file),
        tuple(options.allow_host or ()),
        tuple(options.cors_origin or ()),
    )
    if not is_loopback(access.host) and not access.keys and not options.insecure:
        raise UserError(
            f"--host {access.host} can be reached from other machines: give --api-key-file FILE, or --insecure to serve"
            " whoever asks"
        )
    template = None if options.chat_template is None else read_template(options.chat_template)
    limits = Limits(
        options.max_queued, options.max_queued_tokens, options.max_body, options.drain, options.stall, options.lenient
    )
    run(models, access, limits, template, page_settings(options))


app.command()(serve)


def model_settings(options: ServeOptions) -> list[ModelSettings]:
    """One for each target; draft, corpus and drafter are the first one's.

    Raises UserError for no target, and for a name given twice.
    """
    first: ModelSettings | None = None
    found: dict[str, ModelSettings] = {}
    targets = [*(options.targets or ()), *(options.target or ())]
    if not targets:
        raise UserError("name a model to serve: a run folder, a model directory, a GGUF file or a hub name")
    for said in targets:
        name, path = _named(said)
        if name in found:
            raise UserError(f"--target: two models would be called {name!r}; name one with NAME=PATH")
        if first is None:
            first = found[name] = ModelSettings(
                name=name,
                path=path,
                draft=options.draft,
                drafter=options.drafter,
                corpus=None if options.corpus is None else str(options.corpus),
                draft_length=options.draft_length,
                kv=options.kv,
                states=options.states,
                pages=options.pages,
                context=options.context,
                max_batch=options.max_batch,
                device=options.device,
                threads=options.threads,
                kernels=options.kernels,
            )
        else:
            found[name] = replace(first, name=name, path=path, draft=None, drafter=None, corpus=None)
    if options.original is not None and first is not None:
        if ORIGINAL in found:
            raise UserError(f"--target: {ORIGINAL!r} is the name of --original; name the target with NAME=PATH")
        found[ORIGINAL] = replace(first, name=ORIGINAL, path=options.original, draft=None, drafter=None, corpus=None)
    return list(found.values())


def page_settings(options: ServeOptions) -> PageSettings:
    """What the page shows. Raises UserError for a folder of runs that is none."""
    if options.runs is not None and not options.runs.is_dir():
        raise UserError(f"--runs: {options.runs} is no folder; give the one that holds the runs")
    return PageSettings(options.runs, None if options.original is None else ORIGINAL)


def require_packages() -> None:
    """Raises UserError where the extra `serve` is not installed."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        names = ", ".join(name.replace("_", "-") for name in missing)
        raise UserError(f"serving needs {names}: pip install 'specpress[serve]'")


def _named(said: str) -> tuple[str, str]:
    """(name, path) of a --target."""
    name, sign, path = said.partition("=")
    if sign and name and "/" not in name and path:
        return name, path
    folder = Path(said)
    parts = [part for part in folder.parts if part not in ("/", ".", "..")] or ["model"]
    if parts[-1] in _GENERIC and len(parts) > 1:
        return parts[-2], said
    return (folder.stem if folder.is_file() else parts[-1]), said
