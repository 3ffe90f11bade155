"""Random numbers keyed by where they are used, never by when.

A number depends on (seed, absolute position of the token being chosen, stream) alone, so speculation, the draft and the
neighbours in a batch cannot move it. The generator is counter-based: Philox (Salmon et al., SC 2011), keyed by (seed,
position).
"""

import sys
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from runtime.native.binding import library

# Positions whose noise a text keeps: with a large vocabulary each is a megabyte, and later ones are seldom reached.
_KEPT = 8

# The bits of 1.0.
_ONE = np.float64(1).view(np.uint64)


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


class _Key(ISeedSequence):
    """Hands Philox its key. The argument `key` of Philox means the same, but first asks the system for entropy."""

    def __init__(self, seed: int, position: int) -> None:
        self._words = (seed, position)

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> NDArray[Any]:
        """The two words of the key."""
        return np.array(self._words, dtype=dtype)


def uniforms(seed: int, position: int, stream: Stream, count: int, lane: int = 0) -> NDArray[np.float64]:
    """`count` float64 numbers in the open interval (0, 1); a smaller count is a prefix of a larger one.

    `seed` is in [0, 2**64), `position` ≥ 0. `lane` ≥ 0 tells apart what one position needs several independent times,
    as the nodes of a tree do. The native library makes them where there is one: the same bits.
    """
    native, _ = library()
    if native is None:
        return by_numpy(seed, position, stream, count, lane)
    numbers = np.empty(count)
    native.specpress_uniforms(seed, position, lane, stream, count, numbers.ctypes.data)
    return numbers


def by_numpy(seed: int, position: int, stream: Stream, count: int, lane: int = 0) -> NDArray[np.float64]:
    """`uniforms` without the native library: what its numbers are."""
    # Raw words rather than Generator.random: numpy promises that they never change from release to release.
    # numpy documents any ISeedSequence here; its stubs name only the one that it ships.
    key, counter = _Key(seed, position), np.array((0, 0, lane, stream), dtype=np.uint64)
    words: NDArray[np.uint64] = np.random.Philox(key, counter=counter).random_raw(count)  # type: ignore[arg-type]
    # 52 bits and a half step: every value is exact, and neither 0 nor 1 can occur (their logarithms would be infinite).
    # The bits are made into the fraction of a number in [1, 2), which takes no memory and no conversion.
    words >>= np.uint64(12)
    words |= _ONE
    numbers: NDArray[np.float64] = words.view(np.float64)
    numbers -= 1 - 2.0**-53
    return numbers


def exponential(seed: int, position: int, count: int) -> NDArray[np.float64]:
    """Standard exponential noise (count,) float64 for choosing the token at `position`; −log of it is Gumbel noise."""
    noise = uniforms(seed, position, Stream.CHOICE, count)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


class Memo:
    """`exponential` for one text, which draft and target ask for the same positions: what is drawn once is kept.

    Drawing is half of a sampled token's cost.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], NDArray[np.float64]] = {}

    def exponential(self, seed: int, position: int, count: int) -> NDArray[np.float64]:
        """What the function `exponential` returns, to be read only."""
        key = (position, seed, count)
        noise = self._kept.get(key)
        if noise is None:
            noise = exponential(seed, position, count)
            if len(self._kept) < _KEPT:
                self._kept[key] = noise
        return noise

    def forget(self, before: int = sys.maxsize) -> None:
        """Drops the noise of the positions before this one: they have their tokens."""
        if self._kept:
            for key in [key for key in self._kept if key[0] < before]:
                del self._kept[key]


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
