"""`python -m runtime.generate`: continues a prompt, speculatively, and says how well it went."""

import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.checkpoints.locate import here
from runtime.cli import without_traceback
from runtime.errors import UserError, meant

if TYPE_CHECKING:
    from runtime.contract import Decoder
    from runtime.model.load import Model
    from runtime.sampling.params import Sampling
    from runtime.speculate import Stream

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


# Drafters that may be named with others (drafters/by_name.py): "a+b" has b draft where a finds nothing, "a,b" whoever
# gains the most tokens per second.
_DRAFTERS = (
    "model",
    "tree",
    "lookup",
    "suffix",
    "nested",
    "medusa",
    "block",
    "eagle3",
    "peagle",
    "dflash",
    "dspark",
    "mtp",
)
_ALONE = ("none", "auto")


def drafter_name(name: str | None) -> str | None:
    """A --drafter as it is, checked before anything is loaded. Raises typer.BadParameter for an unknown name."""
    unknown = None if name is None or name in _ALONE else next((p for p in _parts(name) if p not in _DRAFTERS), None)
    if unknown is None:
        return name
    known = (*_ALONE, *_DRAFTERS)
    raise typer.BadParameter(
        f"expected {', '.join(known)}, or several such as lookup+model or lookup,model, found {unknown!r}: "
        f"{meant(unknown, known, 'correct it')}"
    )


def _parts(name: str) -> list[str]:
    return [part for names in name.split(",") for part in names.split("+")]


class RuleName(StrEnum):
    """How sampled proposals are verified."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    TYPICAL = "typical"


@app.command()
def main(
    target: Annotated[str, typer.Option(help="A model directory, a run folder, or a hub name.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="The text to continue.", show_default=False)],
    draft: Annotated[
        str | None,
        typer.Option(help="A directory of a draft model, Medusa heads, a block or another head; by default the run's."),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            callback=drafter_name,
            help="Who proposes tokens: none, model, tree, lookup, suffix, nested (int8 targets), medusa, block, eagle3,"
            " peagle, dflash, dspark, mtp or auto; lookup+model: the second where the first finds nothing;"
            " lookup,model: who gains most.",
            show_default="the fastest by the run's report; without one block where the run has one, model where"
            " there is a draft, else medusa, else lookup",
        ),
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="For the drafter suffix: a text file that the text may resemble.")
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(
            help="For the drafter tree: a fixed shape, each node's number of children breadth first, such as 2,2,1,1.",
            show_default="grows where it is most probable",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most probable tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the most probable tokens of this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the most probable one.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens seen before get less probable.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Subtracted from the logit of every generated token.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, once per earlier generation of it.")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="Added to a token's logit. Repeatable.", metavar="ID:VALUE")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends the output and is not shown. Repeatable.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Do not stop before this many tokens.")] = 0,
    beams: Annotated[int | None, typer.Option(help="Beam search of this width, without speculation.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    draft_length: Annotated[
        int | None,
        typer.Option(help="Tokens drafted a round, 0 to 64.", show_default="what pays most, chosen every round"),
    ] = None,
    verify: Annotated[
        RuleName, typer.Option(help="coupled: a seed's text does not depend on the draft; rejection: accepts the most.")
    ] = RuleName.COUPLED,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Allow --verify typical, which changes what is written.")
    ] = False,
    kv: Annotated[
        str,
        typer.Option(
            help="Keys and values in float32, int8, int4, int3 or, on GPUs, float16.",
            show_default="as the artifact says",
        ),
    ] = "auto",
    states: Annotated[
        str,
        typer.Option(help="States of delta nets, state spaces and convolutions: float32, float16 or, on CPUs, int8."),
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of prompt and answer, where a model rotates long texts otherwise (LongRoPE).", min=2),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; by default one per physical core.")] = None,
    kernels: Annotated[
        str,
        typer.Option(
            help="auto, or by name: amx-int8, avx512-vnni, avx-vnni, avx2, neon-i8mm, neon-dotprod, portable,"
            " plain-torch or reference; on GPUs triton, library, torch-int-mm, torch-int4, torch-scaled-mm, torch or"
            " bitsandbytes."
        ),
    ] = "auto",
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message, written by the chat template.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the new text on standard output.")] = False,
) -> None:
    """Continues a prompt with a target model and a drafter, and prints acceptance and speed at the end."""
    with without_traceback():
        here(target)
        # Imported here: torch takes longer to load than `--help` may take.
        from runtime.model.load import load
        from runtime.sampling.params import Sampling
        from runtime.speculate import CacheOptions, Speculator, lossless_class
        from runtime.speculative.drafters.by_name import drafter_by_name
        from runtime.speculative.recorded import needs_planes

        penalties, bias = (repetition_penalty, presence_penalty, frequency_penalty), _bias(logit_bias or [])
        sampling = Sampling(temperature, top_k, top_p, min_p, *penalties, seed, bias, min_tokens)
        cache = CacheOptions(kv, None, states)  # type: ignore[arg-type]  # it refuses what is no kind
        options: dict[str, Any] = {"device": device, "threads": threads, "kernels": kernels, "context": context}
        if beams is not None:
            _require_plain(sampling, stop, draft, drafter)
            if chat:
                raise UserError("--beams continues a text; leave out --chat, or --beams.")
            _search(load(target, **options), prompt, beams, max_new_tokens, quiet)
            return
        model = load(target, planes=needs_planes(drafter, draft, target), **options)
        named = drafter_by_name(model, drafter, draft, corpus, verify.value, options, tree)
        speculator = Speculator(model, named.drafter, draft_length, verify.value, lossy, cache, prior=named.prior)
        asked = _message(model, prompt) if chat else prompt
        stream = speculator.stream(asked, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)
        _print(f"{prompt}\n" if chat else prompt, stream, quiet)
        lossless = lossless_class(model, verify.value, sampling)
        lines = [
            ("drafter", f"{speculator.drafter.name}{named.note}"),
            *stream.metrics.summary(),
            ("ended by", str(stream.finish)),
        ]
        if (scheme := model.decoder.kv).kind != "float32" or scheme.note or kv != "auto":
            kind = scheme.kind if kv == "auto" else kv
            factors = ", keys by calibrated factors" if scheme.factors(kind) else ""  # type: ignore[arg-type]
            factors = ", in rotated bases" if scheme.bases_of(kind) else factors  # type: ignore[arg-type]
            lines.append(("cache", f"{kind}{factors}{f' ({scheme.note})' if scheme.note else ''}"))
        if states != "float32":
            lines.append(("states", states))
        _summarise([*lines, ("kernels", _kernels(model.decoder)), ("lossless class", lossless)], quiet)


def _bias(entries: list[str]) -> dict[int, float]:
    """`ID:VALUE` of each `--logit-bias`. Raises UserError for another form, or an id that is given twice."""
    bias: dict[int, float] = {}
    for entry in entries:
        try:
            token, value = entry.split(":")
            id_, added = int(token), float(value)
        except ValueError:
            raise UserError(f"--logit-bias must be ID:VALUE, such as 13:-100, but is {entry!r}; change it.") from None
        if id_ in bias:
            raise UserError(f"--logit-bias names token {id_} twice; leave out one of the two.")
        bias[id_] = added
    return bias


def _require_plain(sampling: "Sampling", stop: list[str] | None, draft: str | None, drafter: str | None) -> None:
    """Beam search looks for the most probable text: nothing is sampled, penalised, drafted or stopped by a text."""
    if not (sampling.greedy and sampling.plain):
        raise UserError(
            "--beams looks for the most probable text as the model has it; leave out temperature, penalties, "
            "--logit-bias and --min-tokens, or --beams."
        )
    if stop:
        raise UserError("--beams ends with the model's own stop tokens only; leave out --stop, or --beams.")
    if draft is not None or drafter not in (None, "none"):
        raise UserError("--beams searches without speculation; leave out --draft and --drafter, or --beams.")


def _message(model: "Model", prompt: str) -> list[int]:
    """The tokens of a conversation of one message, up to where its answer begins."""
    from runtime.sampling.conversation import Conversation

    conversation = Conversation(model.tokenizer)
    if not conversation.has_template:
        raise UserError("--chat needs a tokenizer with a chat template, and this model's has none; leave it out.")
    return conversation.ask(prompt)


def _search(model: "Model", prompt: str, beams: int, max_new_tokens: int, quiet: bool) -> None:
    """Prints the best text that a beam search finds."""
    from runtime.engine.beam import beam_search

    # The tokenizer is read at its first use, which takes longer than a short text.
    tokens = model.tokenizer(prompt)["input_ids"]
    started = time.perf_counter()
    found = beam_search(model, tokens, beams, max_new_tokens)
    spent = time.perf_counter() - started
    sys.stdout.write(found[0].text if quiet else f"{prompt}{found[0].text}\n\n")
    sys.stdout.flush()
    count = len(found[0].tokens)
    lines = [
        ("beams", str(beams)),
        ("score", f"{found[0].score:.4f} (sum of log-probabilities / tokens)"),
        ("scores of the others", ", ".join(f"{beam.score:.4f}" for beam in found[1:]) or "-"),
        ("tokens/s", f"{count / spent:.1f} ({count} tokens, prompt included in the time)"),
        ("kernels", _kernels(model.decoder)),
    ]
    _summarise(lines, quiet)


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


def _kernels(decoder: "Decoder") -> str:
    """Which kernels ran, on how many threads; and why not the native ones, where a CPU had to do without."""
    from runtime.kernels import available
    from runtime.model.layers import described

    shown = f"{described(decoder)}, {decoder.threads} thread{'' if decoder.threads == 1 else 's'}"
    native = available("cpu")[0]
    missing = decoder.kernels == "plain-torch" and decoder.device.type == "cpu" and not native.usable
    return f"{shown} ({native.why})" if missing else shown


def _summarise(lines: Sequence[tuple[str, str]], quiet: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for label, value in lines:
        table.add_row(label, value)
    Console(stderr=quiet, highlight=False).print(table)


if __name__ == "__main__":
    app()
