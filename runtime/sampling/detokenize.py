"""Between text and token ids: tokenizers, streamed text, prompts, and whether two models share a vocabulary."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from runtime.errors import UserError, fault_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from runtime.contract import Decoder

# Tokens of the prompt that new tokens are decoded after: some tokenizers write a word's space only after another word.
_CONTEXT = 6


def read_tokenizer(directory: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a model directory. Raises UserError where there is none, or none that takes a text."""
    from transformers import AutoTokenizer

    with fault_of(directory.name, "no tokenizer could be read; put a sound tokenizer.json beside the weights"):
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(
            directory, config=_what_is_asked_of_a_config(directory), trust_remote_code=False
        )
        # What the files say wrong often shows at the first text.
        decode(tokenizer, tokenizer("a", verbose=False)["input_ids"])
    return tokenizer


def _what_is_asked_of_a_config(directory: Path) -> SimpleNamespace | None:
    """What AutoTokenizer asks of a configuration where tokenizer_config.json names the tokenizer's class; else None.

    Without it the whole configuration is made, whose class takes 1.4 s to import.
    """
    try:
        model, said = (
            json.loads((directory / name).read_text(encoding="utf-8"))
            for name in ("config.json", "tokenizer_config.json")
        )
        named = said["tokenizer_class"] and model["model_type"]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # AutoTokenizer says what is wrong, if it is.
    return SimpleNamespace(model_type=model["model_type"], _name_or_path=str(directory)) if named else None


class Detokenizer:
    """Turns tokens into text as they come; a character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_CONTEXT:])
        self._start = 0
        self._shown = len(self._tokens)

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that these tokens complete. `last`: no more will come, so an incomplete character is shown as �."""
        self._tokens += tokens
        before = decode(self._tokenizer, self._tokens[self._start : self._shown])
        text = decode(self._tokenizer, self._tokens[self._start :])
        if text.endswith("�") and not last:
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        # `before` may end in � for a character of the prompt that the new tokens complete: it is shown from there.
        common = len(before)
        while not text.startswith(before[:common]):
            common -= 1
        return text[common:]


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text as it is, without special tokens."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text alone, without the special tokens that the tokenizer would add."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def same_vocabulary(target: Any, draft: Any) -> bool:
    """Whether the two tokenizers give every id to the same token."""
    return bool(target.get_vocab() == draft.get_vocab())


def require_same_vocabulary(target: Any, draft: Any) -> None:
    """Raises UserError naming the first id that the two tokenizers give to different tokens."""
    if same_vocabulary(target, draft):
        return
    ours, theirs = target.get_vocab(), draft.get_vocab()
    ours, theirs = {id_: token for token, id_ in ours.items()}, {id_: token for token, id_ in theirs.items()}
    first = min(id_ for id_ in ours.keys() | theirs.keys() if ours.get(id_) != theirs.get(id_))

    def show(vocabulary: dict[int, str]) -> str:
        return repr(vocabulary[first]) if first in vocabulary else "no token"

    raise UserError(
        f"the draft's vocabulary differs from the target's: token {first} is {show(ours)} in the target and "
        f"{show(theirs)} in the draft; choose a draft with the target's tokenizer, or the drafter `lookup`."
    )


def encode(tokenizer: Any, prompt: str | Sequence[int], decoder: "Decoder") -> list[int]:
    """The prompt's token ids, with the special tokens that the tokenizer adds to a text.

    Raises UserError for an empty prompt, one that leaves no position for a new token, or ids outside the vocabulary.
    """
    tokens = list(tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)
    if not prompt or not tokens:
        raise UserError("the prompt must hold at least one token, but is empty; give some text to continue.")
    vocab_size, max_positions = decoder.vocab_size, decoder.max_positions
    if len(tokens) >= max_positions:
        raise UserError(
            f"the prompt has {len(tokens)} tokens, but the target has {max_positions} positions and needs one for a "
            f"new token; shorten the prompt to at most {max_positions - 1} tokens.{getattr(decoder, 'beyond', '')}"
        )
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise UserError(
            f"the prompt holds token {wrong}, but the target's vocabulary has the ids 0 to {vocab_size - 1}; "
            "encode the prompt with the target's tokenizer."
        )
    return tokens
