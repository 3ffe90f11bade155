"""What `params.Sampling` is made of: each processor as one function over a row, float64 (V,) numpy.

The first four change logits in place, in the order of this file; the rest make probabilities of them. Ids beyond V (an
embedding longer than the head, or a draft with fewer logits) cannot be chosen anyway and are passed over.
"""

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]
# More than the rounding of any sum of probabilities: it stays below 2**-53 times the number of tokens.
_ROUNDING = 1e-9
_LARGEST = 1e300  # of a logit


def forbid(logits: Row, tokens: Collection[int]) -> None:
    """The tokens get probability 0."""
    logits[[token for token in tokens if token < len(logits)]] = -np.inf


def add_bias(logits: Row, bias: Mapping[int, float]) -> None:
    """Adds to each named token's logit; a token that is masked already stays so."""
    for token, value in bias.items():
        if token < len(logits):
            logits[token] += value


def penalise_seen(logits: Row, seen: NDArray[np.int64], penalty: float) -> None:
    """The repetition penalty of CTRL (1909.05858): divides positive and multiplies negative logits of the tokens seen.

    A token that occurs several times is penalised once.
    """
    seen = seen[seen < len(logits)]
    value = logits[seen]
    # A penalty next to 0 overflows, and of infinite logits no probabilities can be made.
    with np.errstate(over="ignore"):
        reward = np.minimum(value / penalty, _LARGEST)
    # Of a token that occurs twice, both new values come from the old one.
    logits[seen] = np.where(value < 0, value * penalty, reward)


def penalise_generated(logits: Row, generated: NDArray[np.int64], presence: float, frequency: float) -> None:
    """Subtracts `presence` once, and `frequency` times its count, from the logit of each generated token (OpenAI)."""
    ids, counts = np.unique(generated[generated < len(logits)], return_counts=True)
    logits[ids] -= frequency * counts + presence


def softmax(logits: Row, temperature: float, top_k: int) -> Row:
    """Probabilities at a temperature above 0, of the `top_k` most probable tokens (0: all; equals of the last stay).

    Overwrites the logits, of which at least one must be finite.
    """
    highest = logits.max()
    if 0 < top_k < len(logits):
        threshold = np.partition(logits, len(logits) - top_k)[len(logits) - top_k]
        logits = np.where(logits < threshold, -np.inf, logits)
    row: Row = np.subtract(logits, highest, out=logits)
    # A very small temperature overflows to −inf, whose exponential is the right 0.
    with np.errstate(over="ignore"):
        row /= temperature
    np.exp(row, out=row)
    row /= row.sum()
    return row


def keep_nucleus(row: Row, top_p: float) -> None:
    """Nucleus sampling (1904.09751): keeps the smallest set of most probable tokens with at least this mass."""
    # A threshold rather than a number of tokens: of equally probable ones all stay.
    row[row < _nucleus(row, 1 - top_p)] = 0
    row /= row.sum()


def keep_likely(row: Row, min_p: float) -> None:
    """Min-p sampling (2407.01082): drops tokens less probable than this share of the most probable one."""
    row[row < min_p * row.max()] = 0
    row /= row.sum()


def _nucleus(row: Row, spare: float) -> float:
    """The smallest probability that top-p keeps of (V,) `row`: the smaller ones add up to at most `spare`."""
    # Tokens below this bound are dropped in any case: together they have at most half of `spare`. So only the others
    # are sorted, few of a vocabulary as a rule, unless rounding could make a difference to sorting all of them.
    head = row[row >= spare / (2 * len(row))]
    head.sort()
    sums = np.cumsum(head)
    sums += row.sum() - sums[-1]
    dropped = int(sums.searchsorted(spare, side="right"))
    if any(abs(total - spare) < _ROUNDING for total in sums[max(dropped - 1, 0) : dropped + 1].tolist()):
        head = np.sort(row)
        dropped = int(np.cumsum(head).searchsorted(spare, side="right"))
    return float(head[min(dropped, len(head) - 1)])
