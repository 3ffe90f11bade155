"""Random numbers keyed by where they are used, never by when.

A number depends on (seed, absolute position of the token being chosen, stream) alone, so speculation, the draft and the
neighbours in a batch cannot move it. The generator is counter-based: Philox (Salmon et al., SC 2011), keyed by (seed,
position).
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Stream(IntEnum):
    """What a number at a position is for. Streams of one position are independent of each other.

    CHOICE   the noise that draft and target share under `coupled`.
    ACCEPT   the acceptance test of `rejection`.
    RESIDUAL the target's own token under `rejection`: the residual, the bonus token, plain sampling.
    DRAFT    the proposer's sample under `rejection`.
    """

    CHOICE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def uniforms(seed: int, position: int, stream: Stream, count: int) -> NDArray[np.float64]:
    """`count` float64 numbers in the open interval (0, 1); a smaller count is a prefix of a larger one.

    `seed` is in [0, 2**64), `position` ≥ 0.
    """
    # Raw words rather than Generator.random: numpy promises that they never change from release to release.
    words = np.random.Philox(key=seed | position << 64, counter=int(stream) << 192).random_raw(count)
    # 52 bits and a half step: every value is exact, and neither 0 nor 1 can occur (their logarithms would be infinite).
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def exponential(seed: int, position: int, count: int) -> NDArray[np.float64]:
    """Standard exponential noise (count,) float64 for choosing the token at `position`; −log of it is Gumbel noise."""
    noise: NDArray[np.float64] = -np.log(uniforms(seed, position, Stream.CHOICE, count))
    return noise


def race(probabilities: NDArray[np.float64], noise: NDArray[np.float64]) -> int:
    """argmax(log p + Gumbel noise), written as argmax(p / exponential noise), which needs no logarithm of p.

    The token is distributed as p (which need not be normalised); the first of equals, and never one with p = 0.
    """
    return int(np.argmax(probabilities / noise))


def pick(weights: NDArray[np.float64], uniform: float) -> int:
    """The index that the inverse of the weights' cumulative sum gives at `uniform` in (0, 1).

    Weights are non-negative with a positive sum, and need not be normalised. An index of weight 0 is never given.
    """
    cumulative = np.cumsum(weights)
    total = cumulative[-1]
    # Rounding may lift the product to the total itself, which no index exceeds.
    threshold = min(uniform * total, np.nextafter(total, 0.0))
    return int(np.searchsorted(cumulative, threshold, side="right"))
