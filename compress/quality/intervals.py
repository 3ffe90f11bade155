"""Level and power of all tests of quality, and the quantiles that they take."""

import math
from statistics import NormalDist

LEVEL, POWER = 0.05, 0.8


def normal(probability: float) -> float:
    """Quantile of the standard normal distribution."""
    return NormalDist().inv_cdf(probability)


def student(probability: float, freedom: int) -> float:
    """Quantile of Student's t with so many degrees of freedom, by bisection of its distribution function."""
    if probability < 0.5:
        return -student(1 - probability, freedom)
    low, high = 0.0, 1.0
    while _above(high, freedom) > 1 - probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _above(middle, freedom) > 1 - probability else (low, middle)
    return (low + high) / 2


def _above(value: float, freedom: int) -> float:
    """P(T > value) for value ≥ 0: a finite sum in the angle arctan(value / √freedom) (Abramowitz and Stegun, 26.7)."""
    angle = math.atan(value / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    inside = 2 * (angle + sine * total) / math.pi if odd else sine * total
    return (1 - inside) / 2
