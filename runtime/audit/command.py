"""What the commands `model` and `engine` of `python -m runtime.audit` do with their options."""

import json
import sys
from pathlib import Path
from typing import Any

import typer

from runtime.audit.options import EngineOptions, OutputOptions
from runtime.audit.report import Audit
from runtime.errors import UserError


def audit_engine(options: EngineOptions) -> None:
    """Audits one engine, shows and writes the result; exit code 1 unless the verdict is "lossless"."""
    from rich.console import Console

    from runtime.audit import known
    from runtime.audit.run import audit
    from runtime.audit.sampled import Known

    if (options.url is None) == (options.callable is None):
        raise UserError("name one engine: --url URL, or --callable package.module:function")
    if options.known is None and options.prompts is None:
        raise UserError(
            "give --known FOLDER (python -m runtime.audit model FOLDER writes it, and the engine runs it), or --prompts"
            " FILE to compare an engine's greedy texts on any model"
        )
    pair = None if options.known is None else Known(*known.read(options.known))
    plan = _plan(options)
    engine = _engine(options)
    quiet = Console(stderr=True)
    with quiet.status("") as status:
        # Said on a terminal only.
        found = audit(engine, pair, plan, lambda said: status.update(said))
    finish(found, options)


def finish(found: Audit, options: OutputOptions) -> None:
    """Shows and writes an audit. Raises typer.Exit with code 1 unless it is lossless."""
    from runtime.audit.output import page, show
    from runtime.bench.output import console, write, write_text

    show(found, console())
    if options.json is not None:
        write(options.json, found.model_dump(mode="json"))
    if options.page is not None:
        write_text(options.page, page(found), "--page")
    if found.verdict != "lossless":
        raise typer.Exit(1)


def write_model(folder: Path, seed: int) -> None:
    """Writes the known model, and says how engines are started on it."""
    from runtime.audit.known_files import write

    write(folder, seed)
    typer.echo(f"wrote {folder}: target/ and draft/ (safetensors); target and draft as .gguf and -f16.gguf")


def _engine(options: EngineOptions) -> Any:
    from runtime.audit.asks import import_engine
    from runtime.audit.http import HttpEngine, HttpOptions

    if options.callable is not None:
        # As `python -m` would: modules of the current folder are found.
        sys.path.insert(0, "")
        return import_engine(options.callable)
    assert options.url is not None
    fields = {name: _fields(name, getattr(options, name)) for name in ("send", "send_drafts", "send_plain")}
    return HttpEngine(
        HttpOptions(
            url=options.url,
            plain_url=options.plain_url,
            model=options.model_name,
            remote=options.remote,
            concurrent=options.concurrent,
            **fields,
        )
    )


def _fields(name: str, said: str | None) -> dict[str, Any]:
    try:
        found = {} if said is None else json.loads(said)
    except ValueError as error:
        found = error
    if not isinstance(found, dict):
        raise UserError(f"--{name.replace('_', '-')} must be a JSON object, found {said!r}")
    return found


def _plan(options: EngineOptions) -> Any:
    from runtime.audit.asks import Ask
    from runtime.audit.run import Plan
    from runtime.audit.sampled import SETTINGS, Setting
    from runtime.bench.prompts import read_prompts

    if options.temperature is None and (options.top_k or options.top_p < 1):
        raise UserError("--top-k and --top-p go with --temperature: give it, too")
    settings: tuple[Setting, ...] = SETTINGS
    if options.temperature is not None:
        settings = (Setting(options.temperature, options.top_k, options.top_p),)
    prompts = () if options.prompts is None else read_prompts(options.prompts)
    return Plan(
        prompts=tuple(Ask((), prompt.text, options.greedy_tokens) for prompt in prompts),
        settings=settings,
        requests=options.requests,
        seconds=options.seconds,
        new_tokens=options.new_tokens,
        greedy_tokens=options.greedy_tokens,
        repeats=options.repeats,
        effect=options.effect,
        tolerance=options.tolerance,
        seed=options.seed,
    )
