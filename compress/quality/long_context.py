"""What a model keeps over long contexts: perplexity by position, and needles found again; by kind of cache.

A needle is a line `key_31415 = 92653` at some depth of held-out text, which ends with the same key; it is found where
every token of the value is the most probable one there. Models that cannot do this as they came say nothing of what
compression took: hence the value's log-likelihood beside it.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from calib.corpora import Corpus
from calib.windows import make_windows
from compress.errors import UserError
from compress.logits import log_probabilities, token_nll
from compress.quality.figures import LongContext, LongContextRow, Needles, PositionBucket
from runtime.contract import CacheKind, Decoder, Rows, integers
from runtime.errors import UserError as RuntimeFloorError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS: tuple[CacheKind, ...] = ("float32", "float16", "int8", "int4", "int3")
LEAST_LENGTH = 64
_BLOCK = 256
_DEPTHS = (0.1, 0.5, 0.9)  # of the text before the question
_WINDOWS = 8
_TRIES = 4  # needles of one length and depth
_PARTS = (4, 2, 1)  # lengths of texts with needles: the longest over these
_FIRST = 64  # tokens in the first bucket; each further one is twice as long


@dataclass(frozen=True)
class Needle:
    """A text (n,) whose last `count` tokens are the value that stands at `depth` of it."""

    tokens: Tensor
    count: int
    length: int
    depth: float


def measure(
    original: Decoder,
    compressed: Decoder,
    windows: Tensor,
    needles: Sequence[Needle],
    kinds: Sequence[CacheKind] = KINDS[:-1],
    on_step: Callable[[int, int], None] | None = None,
) -> LongContext:
    """The original through a float32 cache, and the compressed model through one of each kind.

    windows  (E, L) int64, L at most the decoders' positions.

    A cache that a decoder does not have is a row that says why. Raises UserError for logits that are not finite.
    """
    ways: list[tuple[str, Decoder, CacheKind]] = [("original", original, "float32")]
    ways += [("compressed", compressed, kind) for kind in kinds]
    rows = []
    for done, (name, decoder, kind) in enumerate(ways):
        if on_step is not None:
            on_step(done, len(ways))
        try:
            decoder.new_cache(kind)
        except RuntimeFloorError as error:
            rows.append(LongContextRow(model=name, cache=kind, buckets=[], needles=[], why=str(error)))
            continue
        found = [_look(decoder, needle, kind) for needle in needles]
        rows.append(
            LongContextRow(
                model=name, cache=kind, buckets=by_position(decoder, windows, kind), needles=_counted(needles, found)
            )
        )
    if on_step is not None:
        on_step(len(ways), len(ways))
    return LongContext(length=windows.shape[1], windows=len(windows), rows=rows)


def by_position(decoder: Decoder, windows: Tensor, kind: CacheKind) -> list[PositionBucket]:
    """Perplexity of the predicted tokens of windows (E, L) int64, by positions: 1 to 63, 64 to 127, …"""
    losses = torch.zeros(windows.shape[1] - 1, dtype=torch.float64)
    for tokens in windows:
        losses += torch.cat([*_losses(decoder, tokens, kind)])
    losses /= len(windows)
    edges = [1, *(edge for edge in _edges(windows.shape[1]))]
    return [
        PositionBucket(
            first=first,
            last=end - 1,
            tokens=(end - first) * len(windows),
            perplexity=math.exp(float(losses[first - 1 : end - 1].mean())),
        )
        for first, end in itertools.pairwise(edges)
    ]


def long_windows(
    corpus: Corpus, tokenizer: "PreTrainedTokenizerBase", length: int, seed: int, separator: int | None
) -> Tensor:
    """A few windows (E, length) int64 of text, drawn as evaluation's are, from its first documents.

    Raises UserError for a length that is too short, and text that is.
    """
    if length < LEAST_LENGTH:
        raise UserError(f"--long-context: expected at least {LEAST_LENGTH} tokens, found {length}: ask for more")
    return make_windows(
        corpus,
        tokenizer,
        length=length,
        calibration=0,
        evaluation_tokens=_WINDOWS * length,
        seed=seed,
        separator=separator,
    ).evaluation


def _edges(length: int) -> Iterator[int]:
    edge = _FIRST
    while edge < length:
        yield edge
        edge *= 2
    yield length


def make_needles(windows: Tensor, tokenizer: "PreTrainedTokenizerBase", seed: int, tries: int = _TRIES) -> list[Needle]:
    """Needles in windows (E, L) int64: at three depths of texts of L / 4, L / 2 and L tokens, the question included.

    Raises UserError where the shortest text has no room for a needle.
    """
    chooser = random.Random(f"{seed} needles")
    found = []
    for length in (windows.shape[1] // part for part in _PARTS):
        for depth in _DEPTHS:
            for _ in range(tries):
                line, count = _line(tokenizer, chooser)
                room = length - 2 * len(line)
                if room < len(line):
                    raise UserError(
                        f"expected room for needles in texts of {length} tokens, found a line of {len(line)}: ask for "
                        "longer ones"
                    )
                text = windows[chooser.randrange(len(windows))][:room]
                cut = max(1, int(depth * room))
                tokens = torch.cat([text[:cut], line, text[cut:], line])
                found.append(Needle(tokens, count, length, depth))
    return found


def _line(tokenizer: "PreTrainedTokenizerBase", chooser: random.Random) -> tuple[Tensor, int]:
    """A line's tokens, and how many of them are the value."""
    for _ in range(100):
        key, value = (chooser.randrange(10_000, 100_000) for _ in range(2))
        asked, whole = (
            tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            for text in (f"\nkey_{key} =", f"\nkey_{key} = {value}")
        )
        if whole[: len(asked)] == asked and len(whole) > len(asked):
            return integers(whole), len(whole) - len(asked)
    raise UserError("the tokenizer splits no number from the text before it, so that no needle can be asked for")


def _look(decoder: Decoder, needle: Needle, kind: CacheKind) -> tuple[bool, float]:
    """Whether the value is found, and its mean log-likelihood, nats a token."""
    losses: list[Tensor] = []
    right = True
    for start, logits in _logits(decoder, needle.tokens, kind, len(needle.tokens) - 1 - needle.count):
        targets = needle.tokens[start + 1 : start + 1 + len(logits)].to(logits.device)
        right = right and bool((logits.argmax(1) == targets).all())
        losses.append(token_nll(log_probabilities(logits), targets).cpu())
    return right, -float(torch.cat(losses).mean())


def _counted(needles: Sequence[Needle], found: Sequence[tuple[bool, float]]) -> list[Needles]:
    """One row for each length and depth."""
    places: dict[tuple[int, float], list[int]] = {}
    for place, needle in enumerate(needles):
        places.setdefault((needle.length, needle.depth), []).append(place)
    return [
        Needles(
            length=length,
            depth=depth,
            tries=len(members),
            found=sum(found[i][0] for i in members),
            log_likelihood=sum(found[i][1] for i in members) / len(members),
        )
        for (length, depth), members in places.items()
    ]


def _losses(decoder: Decoder, tokens: Tensor, kind: CacheKind) -> Iterator[Tensor]:
    for start, logits in _logits(decoder, tokens, kind, 0):
        targets = tokens[start + 1 : start + 1 + len(logits)].to(logits.device)
        for rows, wanted in zip(logits.split(64), targets.split(64), strict=True):
            yield token_nll(log_probabilities(rows), wanted).cpu()


def _logits(decoder: Decoder, tokens: Tensor, kind: CacheKind, first: int) -> Iterator[tuple[int, Tensor]]:
    """(position, logits (n, vocabulary)) of the positions from `first` up to the last but one, a block at a time."""
    cache = decoder.new_cache(kind)
    request, count = cache.open(len(tokens)), len(tokens) - 1
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        wanted = range(max(first - start, 0), end - start)
        rows = Rows.chains([(request, start, end - start)])
        with torch.inference_mode():
            at = integers(wanted or [end - start - 1])
            logits = decoder.forward(tokens[start:end], rows, cache, at).logits
        if not bool(torch.isfinite(logits).all()):
            raise UserError(f"long contexts through a {kind} cache: expected finite logits, found others at {start}")
        if wanted:
            yield start + wanted.start, logits
    cache.close(request)
