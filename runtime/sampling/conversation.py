"""A conversation as a prompt: by the tokenizer's chat template, or as one text where it has none."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from runtime.errors import UserError, fault_of

LONGEST = 10.0  # seconds for a chat template, which is somebody's program; sound ones take milliseconds


@dataclass
class Conversation:
    """What was said so far, and what the model is to read of it.

    tokenizer  with a chat template, or without: then the turns are one text.
    system     the first message, where there is a template.
    """

    tokenizer: Any
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.system is not None and not self.has_template:
            raise UserError("--system needs a tokenizer with a chat template, and this model's has none: leave it out")

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer says how a conversation is written."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def ask(self, said: str) -> list[int]:
        """Adds a turn; returns the tokens of everything up to where the answer begins."""
        self.messages.append({"role": "user", "content": said})
        if not self.has_template:
            # An answer goes on where its turn ended; the next turn begins on a line of its own.
            text = "".join("\n" * (m["role"] == "user") + m["content"] for m in self.messages)[1:]
            return list(self.tokenizer(text)["input_ids"])
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        text = written(self.tokenizer, [*first, *self.messages], answer=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def written(tokenizer: Any, messages: Sequence[Mapping[str, Any]], answer: bool) -> str:
    """Messages as the tokenizer's chat template writes them, up to where the next answer begins where one is wanted.

    Raises UserError for a template that cannot write them, or does not come to an end.
    """
    where = "the tokenizer's chat template"
    with fault_of(where, "it cannot write this conversation"), _at_most(LONGEST, where):
        return str(tokenizer.apply_chat_template([*messages], add_generation_prompt=answer, tokenize=False))


@contextmanager
def _at_most(seconds: float, where: str) -> Iterator[None]:
    """Ends what it holds, in the main thread, after so long: where the system has alarms, as Windows has not.

    Raises UserError.
    """
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise UserError(f"{where}: it had not ended after {seconds:g} s: correct it, or take another tokenizer")

    handler = signal.signal(signal.SIGALRM, stop)
    # Again and again: what is raised while jinja computes constants beforehand, it swallows.
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
