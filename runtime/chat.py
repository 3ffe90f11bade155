"""`python -m runtime.chat` and `specpress chat`: a conversation in the terminal, answered speculatively as it comes."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.checkpoints.locate import here
from runtime.cli import without_traceback
from runtime.errors import UserError
from runtime.generate import drafter_name

if TYPE_CHECKING:
    from runtime.engine.metrics import Metrics
    from runtime.model.load import Model
    from runtime.sampling.conversation import Conversation
    from runtime.sampling.params import Sampling
    from runtime.speculate import CacheOptions, Speculator, Stream

HELP = "/speed shows α, τ and tokens/s · /reset starts again · Ctrl-C ends an answer · Ctrl-D ends the chat"
PAGE = 64  # tokens

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def command(
    model_path: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="A run folder, a model directory, a GGUF file or a hub name."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="The same as an option.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="The directory of a draft model, Medusa heads, a block or another head.", show_default="the run's own"
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            callback=drafter_name,
            help="Who proposes tokens, as specpress generate names them.",
            show_default="the fastest by the run's report; without one block where the run has one, model where"
            " there is a draft, else medusa, else lookup",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the chat template's system message says.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="End an answer after this many tokens.")] = 512,
    context: Annotated[int, typer.Option(help="Tokens to keep memory for: the conversation and the answer.")] = 4096,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample among the most probable tokens of this mass.")] = 0.95,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")] = None,
    kernels: Annotated[str, typer.Option(help="auto, or a set of kernels by name.")] = "auto",
) -> None:
    """Answers what you type, turn by turn, with the tokenizer's chat template where it has one.

    A model without a template continues the text instead. Lines on standard input that is no terminal are the turns of
    one conversation; then only the answers are printed.
    """
    with without_traceback():
        path = _one(model_path, target)
        here(path)
        from runtime.model.load import load
        from runtime.sampling.conversation import Conversation
        from runtime.sampling.params import Sampling
        from runtime.speculate import Speculator
        from runtime.speculative.drafters.by_name import drafter_by_name
        from runtime.speculative.recorded import needs_planes

        options: dict[str, Any] = {"device": device, "threads": threads, "kernels": kernels, "context": context}
        model = load(path, planes=needs_planes(drafter, draft, path), **options)
        chosen = drafter_by_name(model, drafter, draft, options=options)
        room = min(context, model.decoder.max_positions)
        speculator = Speculator(model, chosen.drafter, cache=_cache(model, room), prior=chosen.prior)
        sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        chat = Chat(speculator, Conversation(model.tokenizer, system), sampling, max_new_tokens, room, terminal)
        if terminal:
            kind = "chat" if chat.conversation.has_template else "no chat template: the model continues the text"
            typer.echo(f"{Path(path).name} ({kind}), drafter {speculator.drafter.name}{chosen.note}\n{HELP}")
        for said in _turns(terminal):
            chat.take(said)


@dataclass
class Chat:
    """A conversation and who answers in it.

    room      tokens that the cache holds: conversation and answer.
    terminal  whether somebody is there to read what is no answer.
    spoken    what was counted of the answers since the conversation began.
    """

    speculator: "Speculator"
    conversation: "Conversation"
    sampling: "Sampling"
    max_new_tokens: int
    room: int
    terminal: bool
    spoken: "list[Metrics]" = field(default_factory=list)

    def take(self, said: str) -> None:
        """Does what a line asks for: a command, or an answer."""
        if said == "/reset":
            self.conversation.messages.clear()
            self.spoken.clear()
        elif said == "/speed" and self.terminal:
            _speed(self.spoken)
        elif said.startswith("/") and self.terminal:
            typer.echo(HELP)
        elif said:
            self._answer(said)

    def _answer(self, said: str) -> None:
        """Prints the answer as it comes. Ctrl-C in a terminal ends it, and what was written counts as the answer."""
        try:
            tokens = self.conversation.ask(said)
            most = min(self.max_new_tokens, self.room - len(tokens))
            if most < 1:
                raise UserError(f"the conversation has {len(tokens)} tokens, and {self.room} have room: start again")
            stream = self.speculator.stream(tokens, most, self.sampling)
        except UserError as error:
            if not self.terminal:
                raise
            self.conversation.messages.pop()
            typer.echo(f"error: {error} (/reset starts again)", err=True)
            return
        parts: list[str] = []
        try:
            for piece in stream:
                parts.append(piece.text)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            if not self.terminal:
                raise
        finally:
            stream.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.conversation.messages.append({"role": "assistant", "content": "".join(parts)})
        self.spoken.append(stream.metrics)
        if self.terminal:
            _statistics(stream)


def _cache(model: "Model", room: int) -> "CacheOptions":
    """Pages, which keep what was read for the next turn, where the decoder has them."""
    from runtime.speculate import CONTIGUOUS, CacheOptions

    try:
        model.decoder.new_cache(model.decoder.kv.kind, pages=1)
    except UserError:
        return CONTIGUOUS
    return CacheOptions(pages=-(-room // PAGE))


def _turns(terminal: bool) -> Iterator[str]:
    """Lines of the user until the end of the input."""
    if not terminal:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` a history and keys to edit a line with
    while True:
        try:
            yield input("\n> ").strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo(f"\n{HELP}")


def _one(argument: str | None, option: str | None) -> str:
    """The target, said either way. Raises UserError."""
    found = [said for said in (argument, option) if said is not None]
    if len(found) != 1:
        raise UserError("name one target to talk with: a run folder, a model directory, a GGUF file or a hub name")
    return found[0]


def _speed(spoken: "list[Metrics]") -> None:
    """All answers so far in one line."""
    from runtime.engine.metrics import total

    metrics = total(spoken)
    shown = [f"{metrics.new_tokens} tokens in {len(spoken)} answers"]
    for label, value, form in (
        ("acceptance rate α", metrics.acceptance_rate, ".3f"),
        ("τ tokens a round", metrics.tokens_per_round, ".2f"),
        ("tokens/s", metrics.tokens_per_second, ".1f"),
    ):
        shown.append(f"{label} {'-' if value is None else format(value, form)}")
    typer.secho(f"[{', '.join(shown)}]", dim=True)


def _statistics(stream: "Stream") -> None:
    metrics = stream.metrics
    shown = [f"{metrics.new_tokens} tokens"]
    if metrics.tokens_per_second is not None:
        shown.append(f"{metrics.tokens_per_second:.1f} tokens/s")
    if metrics.acceptance_rate is not None:
        shown.append(f"acceptance rate α {metrics.acceptance_rate:.2f}")
    if metrics.reused_tokens:
        shown.append(f"{metrics.reused_tokens} of {metrics.prompt_tokens} tokens from the cache")
    typer.secho(f"[{', '.join(shown)}]", dim=True)


if __name__ == "__main__":
    app()
