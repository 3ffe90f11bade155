"""Choices of the next line, cut from windows of text: the true line, and others of the same text.

A line is the run of tokens from behind one with a line break to the next such token; its first six tokens stand for
it. The other lines are of the same document and follow the same token (the same indentation), so that each of them
could stand there. Everything is drawn by a seed.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

OPTIONS = 4
MOST_TOKENS = 6  # of a line
_LEAST_TOKENS = 2
_LEAST_CONTEXT = 32  # tokens before a line


@dataclass(frozen=True)
class Choice:
    """A line to choose in window `window`, behind its token `at`. `options[0]` is the true one, which stands there."""

    window: int
    at: int
    options: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Line:
    window: int
    at: int
    after: int  # the token that it follows
    tokens: tuple[int, ...]


def make_choices(
    windows: Tensor, documents: Sequence[int], breaks: Collection[int], count: int, seed: int
) -> list[Choice]:
    """At most `count` choices, window by window.

    windows    (E, L) int64.
    documents  E of them: lines are mixed within one document.
    breaks     tokens that hold a line break.
    """
    lines = [_lines(number, window.tolist(), breaks) for number, window in enumerate(windows)]
    pools: defaultdict[tuple[int, int], dict[tuple[int, ...], None]] = defaultdict(dict)
    for document, found in zip(documents, lines, strict=True):
        for line in found:
            pools[document, line.after].setdefault(line.tokens)
    drawn = random.Random(f"{seed} choices")
    choices: list[Choice] = []
    for document, found in zip(documents, lines, strict=True):
        for line in found:
            if len(choices) == count:
                return choices
            if line.at < _LEAST_CONTEXT:
                continue
            others = [tokens for tokens in pools[document, line.after] if tokens != line.tokens]
            if len(others) >= OPTIONS - 1:
                options = (line.tokens, *drawn.sample(others, OPTIONS - 1))
                choices.append(Choice(line.window, line.at, options))
    return choices


def _lines(window: int, tokens: Sequence[int], breaks: Collection[int]) -> list[_Line]:
    """The window's whole lines that are long enough."""
    ends = [place for place, token in enumerate(tokens) if token in breaks]
    lines = [
        _Line(window, start, tokens[start], tuple(tokens[start + 1 : min(end, start + MOST_TOKENS) + 1]))
        for start, end in itertools.pairwise(ends)
        # Any option fits into the window.
        if start + MOST_TOKENS < len(tokens)
    ]
    return [line for line in lines if len(line.tokens) >= _LEAST_TOKENS]


def line_breaks(windows: Tensor, decode: Callable[[list[int]], str]) -> frozenset[int]:
    """The tokens of windows whose text holds a line break."""
    return frozenset(token for token in windows.unique().tolist() if "\n" in decode([token]))
