"""`python -m runtime.generate`: continues a prompt, speculatively, and says how well it went."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.commands import without_traceback
from runtime.errors import UserError

if TYPE_CHECKING:
    from runtime.drafters import Drafter
    from runtime.loading import Model
    from runtime.metrics import Metrics
    from runtime.rows import Decoder
    from runtime.speculate import Stream

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class DrafterName(StrEnum):
    """Who proposes tokens."""

    NONE = "none"
    MODEL = "model"
    LOOKUP = "lookup"


class RuleName(StrEnum):
    """How sampled proposals are judged."""

    COUPLED = "coupled"
    REJECTION = "rejection"


@app.command()
def main(
    target: Annotated[str, typer.Option(help="A model directory, a run folder, or a hub name.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="The text to continue.", show_default=False)],
    draft: Annotated[str | None, typer.Option(help="A draft model's directory; by default the run's own.")] = None,
    drafter: Annotated[
        DrafterName | None, typer.Option(help="By default model where there is a draft, otherwise lookup.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most probable tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the most probable tokens of this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the most probable one.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens seen before get less probable.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    draft_length: Annotated[
        int | None,
        typer.Option(help="Tokens drafted a round, 0 to 64.", show_default="what pays most, chosen every round"),
    ] = None,
    verify: Annotated[
        RuleName,
        typer.Option(help="coupled: a seed's text does not depend on the draft; rejection: accepts the most."),
    ] = RuleName.COUPLED,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads; by default one per physical core.")] = None,
    kernels: Annotated[str, typer.Option(help="auto, avx512-vnni, avx-vnni, avx2, portable or reference.")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the new text on standard output.")] = False,
) -> None:
    """Continues a prompt with a target model and a drafter, and prints acceptance and speed at the end."""
    with without_traceback():
        # Imported here: torch takes longer to load than `--help` may take.
        from runtime.loading import load
        from runtime.sampling import Sampling
        from runtime.speculate import Speculator, lossless_class

        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed=seed)
        if draft is not None and drafter not in (None, DrafterName.MODEL):
            raise UserError(f"--draft names a model, but --drafter is {drafter.value}; leave out one of the two.")
        options: dict[str, Any] = {"device": device, "threads": threads, "kernels": kernels}
        model = load(target, **options)
        chosen, proposer = _drafter(model, draft, drafter, options)
        speculator = Speculator(model, proposer, draft_length=draft_length, verify=verify.value)
        stream = speculator.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling)
        _print(prompt, stream, quiet)
        lossless = lossless_class(model, verify.value, sampling)
        _summarise(stream.metrics, chosen, _kernels(model.decoder), lossless, quiet)


def _print(prompt: str, stream: "Stream", quiet: bool) -> None:
    """The prompt and what follows it, as it comes; with `quiet` exactly the new text, without a last line break."""
    if not quiet:
        sys.stdout.write(prompt)
    for piece in stream:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    if not quiet:
        sys.stdout.write("\n\n")
        sys.stdout.flush()


def _drafter(
    target: "Model", draft_path: str | None, drafter: DrafterName | None, options: dict[str, Any]
) -> tuple[str, "Model | Drafter | None"]:
    """What was chosen, in words, and the drafter itself."""
    from runtime.loading import load

    found = draft_path if draft_path is not None else target.draft_path
    if drafter is DrafterName.NONE:
        return "none", None
    if drafter is DrafterName.MODEL or (drafter is None and found is not None):
        if found is None:
            raise UserError(
                f"--drafter model needs a draft, but {target.path.name} comes without one; give --draft DIR."
            )
        return f"model ({Path(found).name})", load(found, **options)
    from runtime.drafters.lookup import LookupDrafter

    return "lookup" if drafter is not None else "lookup (no draft was given, and the target has none)", LookupDrafter()


def _kernels(decoder: "Decoder") -> str:
    """Which kernels ran, on how many threads; and why not the native ones, where a CPU had to do without."""
    from runtime.kernels import available

    shown = f"{decoder.kernels}, {decoder.threads} thread{'' if decoder.threads == 1 else 's'}"
    native = available("cpu")[0]
    missing = decoder.kernels == "reference" and decoder.device.type == "cpu" and not native.usable
    return f"{shown} ({native.why})" if missing else shown


def _summarise(metrics: "Metrics", drafter: str, kernels: str, lossless: str, quiet: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    table = Table(show_header=False, box=None, pad_edge=False)
    for label, value in (
        ("drafter", drafter),
        ("α accepted / drafted", f"{show(metrics.acceptance_rate, '.3f')} ({metrics.accepted} / {metrics.drafted})"),
        ("τ tokens a round", show(metrics.tokens_per_round, ".2f")),
        (
            "tokens/s",
            f"{show(metrics.tokens_per_second, '.1f')} ({metrics.new_tokens} tokens, prompt included in the time)",
        ),
        ("mean target width", show(metrics.mean_width, ".2f")),
        ("kernels", kernels),
        ("lossless class", lossless),
    ):
        table.add_row(label, value)
    Console(stderr=quiet, highlight=False).print(table)


if __name__ == "__main__":
    app()
