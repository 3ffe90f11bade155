"""Statistics over tokens as `llama-perplexity --kl-divergence` of llama.cpp defines them.

Errors are standard errors of independent tokens, as there. Tokens of one text are not independent, so these errors are
too small; whether a model is worse is judged from blocks of text (paired.py).
"""

import math
from typing import Any

import numpy as np

from compress.quality.figures import Divergence, Estimate, TokenStatistics

Floats = np.ndarray[Any, np.dtype[np.float64]]


def standard_error(values: Floats) -> float:
    """Of the mean of values (n,), with n − 1 degrees of freedom; 0 for a single one."""
    return float(values.std() / math.sqrt(max(1, len(values) - 1)))


def divergence(kl: Floats) -> Divergence:
    """Of KL divergences (n,), nats. Percentiles lie linearly between the sorted values."""
    median, p99, p999 = np.quantile(kl, (0.5, 0.99, 0.999))
    return Divergence(
        mean=float(kl.mean()),
        p99=float(p99),
        mean_error=standard_error(kl),
        median=float(median),
        p999=float(p999),
        max=float(kl.max()),
    )


def token_statistics(original: Floats, compressed: Floats, agrees: np.ndarray[Any, Any]) -> TokenStatistics:
    """Of both models' losses (n,) of the same tokens, nats, and whether both put the same token first (n,) bool."""
    difference = compressed - original
    ratio = math.exp(difference.mean())
    squares = (np.exp(-compressed) - np.exp(-original)) ** 2
    rms = math.sqrt(squares.mean())
    return TokenStatistics(
        perplexity_ratio=Estimate(value=ratio, error=ratio * standard_error(difference)),
        delta_p_rms=Estimate(value=rms, error=standard_error(squares) / (2 * rms) if rms else 0.0),
        same_top=Estimate(value=float(agrees.mean()), error=standard_error(agrees.astype(np.float64))),
    )
