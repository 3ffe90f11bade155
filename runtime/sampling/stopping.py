"""Where a text ends: stop tokens, and stop strings that may lie across token borders.

Stop strings are looked for token by token, in the text that each token completes. So the end of a text depends on its
tokens alone, never on how many of them a round brought.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from runtime.errors import UserError
from runtime.sampling.detokenize import Detokenizer

if TYPE_CHECKING:
    from runtime.contract import Loaded


class Exactly(NamedTuple):
    """What ends a text, with nothing added to it: not the model's own end tokens either."""

    tokens: frozenset[int]
    strings: tuple[str, ...] = ()


Stop = str | Sequence[str | int] | Exactly


class StopStrings:
    """Watches one request's new text for stop strings, and tells how much of it may be shown.

    strings      not empty, none of them empty.
    detokenizer  of the request; used by nobody else.
    min_tokens   a string that is complete within the first so many tokens does not count.

    A text ends with the token that completes a stop string. Of several strings the first to be complete wins, which is
    the first of the text whatever its tokens are; of those that end with the same character, the longest. The
    replacement character that stands for an unfinished one at the end of a text is not looked at.
    """

    def __init__(self, strings: Sequence[str], detokenizer: Detokenizer, min_tokens: int = 0) -> None:
        if not strings or not all(strings):
            raise ValueError(f"stop strings must not be empty, found {list(strings)}")
        self._strings = tuple(strings)
        self._detokenizer = detokenizer
        self._min_tokens = min_tokens
        self._tokens = 0
        self._text = ""
        self._released = 0
        self.found = False

    def add(self, tokens: Sequence[int]) -> int | None:
        """Takes the next tokens; how many of them the text keeps if a stop string is complete with them, else None.

        Raises ValueError after a stop string was found.
        """
        if self.found:
            raise ValueError("the text has ended with a stop string; no token can follow")
        for count, token in enumerate(tokens, 1):
            self._tokens += 1
            before = len(self._text)
            self._text += self._detokenizer.add([token])
            if self._tokens > self._min_tokens:
                start = self._match(before)
                if start is not None:
                    self._text = self._text[:start]
                    self.found = True
                    return count
        return None

    def release(self, last: bool = False) -> str:
        """The text that may be shown since the last call; it never holds a part of the stop string that ends the text.

        last  no token follows, so nothing has to be held back.
        """
        if last and not self.found:
            self._text += self._detokenizer.add([], last=True)
        ready = len(self._text) - (0 if last or self.found else self._doubtful())
        fresh = self._text[self._released : ready]
        self._released = max(self._released, ready)
        return fresh

    def _match(self, before: int) -> int | None:
        """Where the stop string begins that is the first to end after `before` characters; None without one."""
        matches = []
        for string in self._strings:
            start = self._text.find(string, max(0, before - len(string) + 1))
            if start >= 0:
                matches.append((start + len(string), start))
        return min(matches)[1] if matches else None

    def _doubtful(self) -> int:
        """How many of the last characters may be the beginning of a stop string: the longest such suffix."""
        return max(
            (size for string in self._strings for size in range(1, len(string)) if self._text.endswith(string[:size])),
            default=0,
        )


def kept(tokens: Sequence[int], stop_tokens: Collection[int], strings: StopStrings | None) -> tuple[int, bool]:
    """How many of a round's new tokens the text keeps, and whether it stops with the last of these.

    A stop token is kept, but is no part of the text that `strings` looks at. Takes what is kept into `strings`.
    """
    stop = None
    for place, token in enumerate(tokens):
        if token in stop_tokens:
            stop = place
            break
    if strings is not None:
        complete = strings.add(tokens[:stop])
        if complete is not None:
            return complete, True
    return (len(tokens), False) if stop is None else (stop + 1, True)


def resolve(stop: Stop | None, model: "Loaded", vocab_size: int) -> tuple[frozenset[int], tuple[str, ...]]:
    """The stop tokens and stop strings that a user's `stop` means for this model.

    stop  None: the model's own end tokens. Ids replace these, strings come on top of them; (): nothing ends the text.
          A string that is one of the tokenizer's special tokens means that token: texts never hold it.

    Raises UserError for an empty string, an id outside the vocabulary, or anything else.
    """
    if stop is None:
        return _end_tokens(model), ()
    if isinstance(stop, Exactly):
        tokens, texts = resolve([*stop.tokens, *stop.strings], model, vocab_size)
        return tokens & stop.tokens, texts
    given = [stop] if isinstance(stop, str) else list(stop)
    for one in given:
        if not isinstance(one, str | int):
            raise UserError(f"stop must hold texts and token ids, but holds {one!r}; change that entry.")
        if one == "":
            raise UserError("stop must hold texts of at least one character, but holds an empty one; leave it out.")
        if isinstance(one, int) and not 0 <= one < vocab_size:
            raise UserError(
                f"stop holds token {one}, but the target's vocabulary has the ids 0 to {vocab_size - 1}; "
                "choose one of them."
            )
    ids = frozenset(one for one in given if isinstance(one, int))
    strings = dict.fromkeys(one for one in given if isinstance(one, str))
    if strings and not ids:
        ids = _end_tokens(model)
    added = {str(token): id_ for id_, token in model.tokenizer.added_tokens_decoder.items() if token.special}
    special = {text: id_ for text, id_ in added.items() if text in strings}
    return ids | frozenset(special.values()), tuple(text for text in strings if text not in special)


def _end_tokens(model: "Loaded") -> frozenset[int]:
    found = model.end_tokens
    if not found and model.tokenizer.eos_token_id is not None:
        return frozenset([model.tokenizer.eos_token_id])
    return found
