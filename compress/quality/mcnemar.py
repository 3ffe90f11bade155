"""McNemar's exact test of paired choices (McNemar, 1947), and the loss that a sample can show.

Of n pairs `lost` are right before and wrong after, `won` the other way round; the others say nothing. Without a
difference each of the lost + won falls either way with probability 1/2.
"""

import math
from typing import Any

import numpy as np

from compress.quality.statistics import Floats

_MOST = 10_000_000


def p_value(lost: int, won: int) -> float:
    """Two-sided, exact: twice the smaller tail, 1 at most."""
    count, few = lost + won, min(lost, won)
    return float(min(1.0, 2 * math.fsum(np.exp(_log_binomial(count, np.arange(few + 1), 0.5)))))


def interval(lost: int, won: int, pairs: int, z: float) -> tuple[float, float]:
    """Of won − lost as a share of the pairs: Wald's, with half a pair added to each of the four cells (Agresti and Min,
    2005). z: standard errors to each side."""
    count = pairs + 2
    up, down = (won + 0.5) / count, (lost + 0.5) / count
    error = math.sqrt(max(0.0, up + down - (up - down) ** 2) / count)
    return up - down - z * error, up - down + z * error


def power(pairs: int, discordant: float, loss: float, level: float) -> float:
    """The probability that the test calls a loss at the two-sided `level`, and calls it a loss.

    discordant  probability that a pair flips either way; loss, at most that: lost − won as a share of the pairs.
    """
    if discordant <= 0 or loss <= 0:
        return 0.0
    share = (discordant + loss) / (2 * discordant)
    spread = 6 * math.sqrt(pairs * discordant * (1 - discordant)) + 1
    counts = np.arange(max(1, int(pairs * discordant - spread)), min(pairs, int(pairs * discordant + spread)) + 1)
    weights = np.exp(_log_binomial(pairs, counts, discordant))
    return float(sum(w * _rejects(int(count), share, level) for w, count in zip(weights, counts, strict=True)))


def _rejects(count: int, share: float, level: float) -> float:
    """The probability that of `count` flips so many are losses that the test is significant."""
    wins = np.arange(count + 1)
    tail = np.cumsum(np.exp(_log_binomial(count, wins, 0.5)))
    few = int(np.searchsorted(2 * tail, level, side="right"))  # at most few − 1 wins are significant
    if few == 0 or share >= 1:
        return float(few > 0)
    return float(np.exp(_log_binomial(count, wins[:few], 1 - share)).sum())


def smallest_loss(pairs: int, discordant: float, level: float, wanted: float) -> float:
    """The smallest loss, as a share of the pairs, that the test finds with probability `wanted`.

    discordant  share of pairs that flip either way; where a loss is larger than that all flips are losses. 1 where no
                loss can be shown.
    """
    low, high = 0, pairs  # in pairs; the power grows with the loss
    if power(pairs, 1.0, 1.0, level) < wanted:
        return 1.0
    while high - low > 1:
        middle = (low + high) // 2
        loss = middle / pairs
        low, high = (low, middle) if power(pairs, max(loss, discordant), loss, level) >= wanted else (middle, high)
    return high / pairs


def needed_pairs(discordant: float, loss: float, z: float) -> int:
    """Pairs with which a share `loss` is told from none (Connor, 1987).

    z  the sum of the normal quantiles of the level and of the power.
    """
    return min(_MOST, math.ceil(max(discordant, loss) * (z / loss) ** 2))


def _log_binomial(count: int, taken: np.ndarray[Any, Any], share: float) -> Floats:
    """Natural logarithm of the binomial probabilities of `taken` of `count`; 0 < share < 1, or no count of its own."""
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    with np.errstate(divide="ignore", invalid="ignore"):
        chosen = logs[count] - logs[taken] - logs[count - taken]
        up = np.where(taken == 0, 0.0, taken * np.log(share))
        down = np.where(taken == count, 0.0, (count - taken) * np.log1p(-share))
    return np.asarray(chosen + up + down, dtype=np.float64)
