"""Log-probabilities of a request's tokens, from the rows of logits that chose them or that read its prompt.

A row is worked out by itself, in float64 and in numpy, so that a value depends on the row alone: not on the rows that
came with it, and not on what drafted or batched them.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from runtime.sampling.candidates import largest
from runtime.sampling.distribution import Logits, host, not_finite
from runtime.speculative.draft import Request
from runtime.speculative.wanted import TokenLogprob

# What the logits of a forward may take because prompts ask for log-probabilities.
PROMPT_LOGIT_BYTES = 64_000_000


def token_logprob(row: Logits, token: int, top: int) -> TokenLogprob:
    """The log-probability of `token`, and of the `top` most probable tokens, after logits (V,).

    Raises UserError where a logit is NaN or infinite (−inf, a masked token, may be), or none is above −inf.
    """
    on_host = host(row.cpu()) if isinstance(row, Tensor) else row
    shifted = np.array(on_host, dtype=np.float64)
    highest = shifted.max()
    if not np.isfinite(highest):
        raise not_finite("target")
    shifted -= highest
    shifted -= np.log(np.exp(shifted).sum())
    own = shifted[token]
    best = largest(shifted, min(top, len(shifted))) if top else []
    named = tuple((other, float(shifted[other])) for other in best)
    return TokenLogprob(token, float(own), 1 + int(np.count_nonzero(shifted > own)), named)


def missing_prompt_rows(request: Request) -> bool:
    """Whether rows of its prompt must still be read for their logits, so that cached ones are of no use."""
    wanted, found = request.wanted.prompt_logprobs, request.found.prompt_logprobs
    return wanted is not None and len(found) < request.prompt_length


def scored_rows(request: Request, first: int, count: int) -> range:
    """Which of the tokens first … first + count − 1 of the text have logits that are asked for by its prompt.

    The row of token i tells of token i + 1. Rows that were read before (a preempted request is read again) are not
    asked for again.
    """
    if request.wanted.prompt_logprobs is None:
        return range(0)
    known = max(len(request.found.prompt_logprobs), 1)
    return range(max(first, known - 1), max(first, known - 1, min(first + count, request.prompt_length - 1)))


def note_prompt(request: Request, rows: range, logits: Logits) -> None:
    """Adds the log-probabilities of the prompt's tokens that follow `rows`, whose logits are (len(rows), V).

    Raises UserError as `token_logprob`.
    """
    top, found = request.wanted.prompt_logprobs, request.found.prompt_logprobs
    if top is None:
        return
    if not found:
        found.append(None)
    for place, row in enumerate(rows):
        found.append(token_logprob(logits[place], request.tokens[row + 1], top))


def note_gained(request: Request, gained: int, path: Sequence[int], logits: Logits) -> None:
    """Adds the log-probabilities of the last `gained` tokens of the text.

    path    the accepted indices of the draft among them.
    logits  (n + 1, V) of the draft's nodes, the first of the text before the draft.

    Raises UserError as `token_logprob`.
    """
    top = request.wanted.logprobs
    if top is None:
        return
    nodes = [0, *(1 + index for index in path)]
    new = request.tokens[len(request.tokens) - gained :]
    request.found.logprobs += [token_logprob(logits[node], token, top) for node, token in zip(nodes, new, strict=False)]
