"""How far a model's predictions lie from the original's, token by token of a given text: KL divergence.

Both engines read the text piece by piece, and each piece's logits meet here: a whole text's would take gigabytes.
"""

import asyncio
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.detokenize import Detokenizer
from runtime.serve.errors import invalid
from runtime.serve.models import Served
from runtime.serve.texts import finite

MOST_TOKENS = 4096
_PIECE_BYTES = 4_000_000  # of logits, from each engine
_MOST_ROWS = 128

Logits = NDArray[np.float32]
Floats = NDArray[np.float64]


class Position(TypedDict):
    """A token of the text, and what both models expected in its place; the first token follows nothing.

    text  joined over all positions: the text. A character of several tokens is the last one's.
    kl    KL(original ‖ model), nats.
    """

    text: str
    kl: float | None
    original_logprob: float | None
    logprob: float | None
    original_top: str | None
    top: str | None


async def compare(original: Served, other: Served, text: str) -> dict[str, Any]:
    """Every position of the text, and the whole. Raises ApiError where the two models cannot be compared on it."""
    if original is other:
        raise invalid("the original is compared with another model: name that one", "model")
    tokens = _tokens(original, other, text)
    size = original.about["vocab_size"]
    rows = max(1, min(_MOST_ROWS, _PIECE_BYTES // (4 * size)))
    kl, ours, theirs, tops = list[float](), list[float](), list[float](), list[tuple[int, int]]()
    for first in range(0, len(tokens) - 1, rows):
        count = min(rows, len(tokens) - 1 - first)
        asked = (tokens[:-1], first, count)
        pieces = await asyncio.gather(*(one.front.logits(*asked) for one in (original, other)))
        p, q = (np.frombuffer(piece, np.float32).reshape(count, size) for piece in pieces)
        found = await asyncio.to_thread(_piece, p, q, tokens[first + 1 : first + 1 + count])
        for whole, part in zip((kl, theirs, ours, tops), found, strict=True):
            whole += part  # type: ignore[operator]
    names = original.vocabulary.shown
    texts = _pieces_of_text(original, tokens)
    first_one = Position(text=texts[0], kl=None, original_logprob=None, logprob=None, original_top=None, top=None)
    positions = [first_one]
    for piece_text, value, before, after, (best, now) in zip(texts[1:], kl, theirs, ours, tops, strict=True):
        position = Position(
            text=piece_text,
            kl=value,
            original_logprob=finite(before),
            logprob=finite(after),
            original_top=names(best),
            top=names(now),
        )
        positions.append(position)
    return {
        "positions": positions,
        "mean_kl": float(np.mean(kl)),
        "perplexity": float(np.exp(-np.mean([finite(value) for value in ours]))),
        "original_perplexity": float(np.exp(-np.mean([finite(value) for value in theirs]))),
        "same_top": float(np.mean([best == now for best, now in tops])),
    }


def kl_rows(log_p: Floats, log_q: Floats) -> Floats:
    """KL(p ‖ q) (n,), nats, of log-probabilities (n, vocabulary). What p gives no probability counts nothing."""
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isneginf(log_p), 0.0, np.exp(log_p) * (log_p - log_q))
    return np.maximum(terms.sum(axis=1), 0.0)


def _log_probabilities(logits: Logits) -> Floats:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _piece(p: Logits, q: Logits, following: list[int]) -> tuple[list[float], list[float], list[float], list[Any]]:
    """KL, both log-probabilities of the tokens that follow, and both models' most probable ones."""
    log_p, log_q = _log_probabilities(p), _log_probabilities(q)
    at = np.arange(len(following)), np.array(following)
    tops = list(zip(log_p.argmax(1).tolist(), log_q.argmax(1).tolist(), strict=True))
    return kl_rows(log_p, log_q).tolist(), log_p[at].tolist(), log_q[at].tolist(), tops


def _pieces_of_text(served: Served, tokens: list[int]) -> list[str]:
    detokenizer, most = Detokenizer(served.vocabulary.tokenizer, []), len(tokens)
    return [detokenizer.add([token], place == most) for place, token in enumerate(tokens, 1)]


def _tokens(original: Served, other: Served, text: str) -> list[int]:
    tokens = other.vocabulary.encode(text, None, "text")
    before = original.vocabulary.encode(text, None, "text")
    if tokens != before or original.about["vocab_size"] != other.about["vocab_size"]:
        raise invalid("the two models have different tokenizers, so their predictions cannot be compared", "model")
    most = min(MOST_TOKENS, original.about["context"], other.about["context"])
    if not 2 <= len(tokens) <= most:
        raise invalid(f"the text must have 2 to {most} tokens, but has {len(tokens)}", "text")
    return tokens
