"""What can be said to the commands of `python -m runtime.audit`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where a result is written besides the terminal."""

    json: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.", show_default=False)] = None
    page: Annotated[Path | None, typer.Option(help="Write the result as an HTML page.", show_default=False)] = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(OutputOptions):
    """Of `engine`."""

    url: Annotated[
        str | None, typer.Option(help="The engine: http://127.0.0.1:8000/v1, with its drafts on.", show_default=False)
    ] = None
    plain_url: Annotated[
        str | None, typer.Option(help="The same engine without drafts, at another port.", show_default=False)
    ] = None
    callable: Annotated[
        str | None, typer.Option(help="In place of --url: a Python function, package.module:name.", show_default=False)
    ] = None
    known: Annotated[
        Path | None,
        typer.Option(
            help="The folder of `audit model` whose target (and draft) the engine runs: sampling is tested, too.",
            show_default=False,
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts for greedy texts: .jsonl, or one a line.", show_default="the known model's"
        ),
    ] = None
    model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests.", show_default="the first of /models")
    ] = None
    send: Annotated[
        str | None, typer.Option(help="JSON fields for all requests; null leaves a field out.", show_default=False)
    ] = None
    send_drafts: Annotated[
        str | None, typer.Option(help="JSON fields for requests with drafts.", show_default=False)
    ] = None
    send_plain: Annotated[
        str | None,
        typer.Option(
            help='JSON fields that switch drafts off: {"specpress": {"drafter": "none"}} for this project\'s server.',
            show_default=False,
        ),
    ] = None
    remote: Annotated[bool, typer.Option("--remote", help="Allow URLs that are not this machine's.")] = False
    concurrent: Annotated[int, typer.Option(min=2, max=256, help="The most requests at once.")] = 16
    requests: Annotated[int, typer.Option(min=1, help="The most requests.")] = 3000
    seconds: Annotated[float, typer.Option(min=1, help="The most seconds; what is under way is waited for.")] = 300.0
    new_tokens: Annotated[int, typer.Option(min=4, max=256, help="Tokens of each sampled text.")] = 24
    greedy_tokens: Annotated[int, typer.Option(min=1, max=900, help="Tokens of each greedy text.")] = 48
    repeats: Annotated[int, typer.Option(min=1, max=100, help="How often each greedy text is asked for.")] = 2
    temperature: Annotated[
        float | None,
        typer.Option(min=0.05, max=10, help="Sample at this one setting.", show_default="four settings, see docs"),
    ] = None
    top_k: Annotated[int, typer.Option(min=0, help="With --temperature.")] = 0
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="With --temperature.")] = 1.0
    effect: Annotated[
        float, typer.Option(min=0.005, max=0.5, help="The total variation that has to be found, or it cannot tell.")
    ] = 0.05
    tolerance: Annotated[float, typer.Option(min=0, help="Nats by which log-probabilities may be off.")] = 0.05
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="The first request's; others follow it.")] = 1


@dataclass(frozen=True, kw_only=True)
class OursOptions:
    """Of `ours`."""

    model: Annotated[
        Path, typer.Argument(help="A run folder, model directory or GGUF file, or a folder of `audit model`.")
    ]
    draft: Annotated[Path | None, typer.Option(help="The draft model.", show_default="the run's own")] = None
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts: .jsonl, or one a line.", show_default="random tokens")
    ] = None
    settings: Annotated[int, typer.Option(min=1, help="The most combinations of settings.")] = 500
    seconds: Annotated[float, typer.Option(min=1, help="The most seconds.")] = 600.0
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text.")] = 32
    out: Annotated[
        Path | None, typer.Option(help="A file of results, from which a stopped sweep goes on.", show_default=False)
    ] = None
    json: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.", show_default=False)] = None
    seed: Annotated[int, typer.Option(min=0, help="Of the settings' order and of the prompts.")] = 0
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")] = None
    kernels: Annotated[str, typer.Option(help="auto, or a set of kernels by name.")] = "auto"


@dataclass(frozen=True, kw_only=True)
class CertificateOptions:
    """Of `certificate`."""

    run: Annotated[Path, typer.Argument(help="A run folder whose report.json holds a certificate.")]
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")] = None
    kernels: Annotated[str, typer.Option(help="auto, or a set of kernels by name.")] = "auto"
    json: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.", show_default=False)] = None
