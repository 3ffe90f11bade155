"""Tests of samples against known distributions: of counts, of sums, of dependence; and what is made of many p-values.

All of them are tests of martingales: each token is compared with its distribution given all tokens before it, whatever
these were, so that sums over requests, positions and contexts are normal with a known variance.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.audit.known import Array

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

# Cells of less variance are joined: the normal law does not hold for them.
_VARIANCE = 10.0
_SMALLEST = 30  # tokens of a group
_BINS = 8
# Tests are screened on one half of the requests, and those that fail are confirmed on the other half. Of sound engines
# at most SCREEN · CONFIRM are accused, were the tests' p-values exact.
SCREEN, CONFIRM = 0.05, 0.02


def chi_squared_tail(statistic: float, degrees: int) -> float:
    """P(X ≥ statistic) of a chi-squared variable."""
    half = torch.tensor([degrees / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def score(observed: Array, expected: Array, covariance: Array) -> tuple[float, int]:
    """The statistic of counts (C,) against what was expected of them (C,), and its degrees of freedom.

    dᵀ Σ⁻¹ d, with the covariance (C, C) of the counts' sum, over cells of enough variance, the rest of them joined into
    one; one cell is left out, as counts sum to their number. (0, 0) where fewer than two cells remain.
    """
    large = np.flatnonzero(np.diag(covariance) >= _VARIANCE)
    small = np.setdiff1d(np.arange(len(observed)), large)
    joined = np.zeros((len(large) + 1, len(observed)))
    joined[np.arange(len(large)), large] = 1.0
    joined[len(large), small] = 1.0
    variances = joined @ covariance @ joined.T
    kept = np.arange(len(large)) if variances[-1, -1] >= _VARIANCE else np.arange(len(large) - 1)
    if len(kept) < 1:
        return 0.0, 0
    difference = (joined @ (observed - expected))[kept]
    statistic = difference @ np.linalg.lstsq(variances[np.ix_(kept, kept)], difference, rcond=1e-10)[0]
    return float(statistic), len(kept)


def token_test(tokens: Ints, probs: Array, groups: Ints | None = None) -> float | None:
    """The p-value of (n,) tokens, each against its own row of (n, C) probabilities.

    groups  (n,) numbers from 0: tokens of a group are counted by themselves, and the groups' statistics added up.
    """
    statistic, degrees = 0.0, 0
    order = np.arange(len(tokens)) if groups is None else np.argsort(groups, kind="stable")
    ends: Ints = np.flatnonzero(np.diff(order if groups is None else groups[order])) + 1
    if groups is None:
        ends = ends[:0]
    for rows in np.split(order, ends):
        if len(rows) < _SMALLEST:
            continue
        expected = probs[rows].sum(axis=0)
        observed = np.bincount(tokens[rows], minlength=probs.shape[1]).astype(np.float64)
        more, free = score(observed, expected, np.diag(expected) - probs[rows].T @ probs[rows])
        statistic, degrees = statistic + more, degrees + free
    return chi_squared_tail(statistic, degrees) if degrees else None


def sum_test(values: Array, means: Array, variances: Array) -> float | None:
    """The p-value, on both sides, of a sum of (n,) numbers with these means and variances."""
    variance = float(variances.sum())
    if variance < _VARIANCE:
        return None
    return chi_squared_tail(float((values - means).sum() ** 2 / variance), 1)


def event_test(events: Bools, chances: Array) -> float | None:
    """`sum_test` of events (n,) that had these chances."""
    return sum_test(events.astype(np.float64), chances, chances * (1 - chances))


def uniforms(tokens: Ints, probs: Array, seed: int, ranked: bool) -> Array:
    """(…) numbers that are independent and uniform where (…) tokens were drawn from (…, C) probabilities.

    Each is a random point of its token's interval of the distribution function, in the tokens' order, or with `ranked`
    from the most probable to the least: what an engine that samples by inversion drew, up to that point.
    """
    if ranked:
        order = np.argsort(-probs, axis=-1, kind="stable")
        tokens = np.argmax(order == tokens[..., None], axis=-1)
        probs = np.take_along_axis(probs, order, axis=-1)
    upto = np.cumsum(probs, axis=-1)
    own = np.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
    below = np.take_along_axis(upto, tokens[..., None], axis=-1)[..., 0] - own
    return below + own * np.random.default_rng([seed, int(ranked)]).random(tokens.shape)


def dependence_test(first: Array, second: Array) -> float | None:
    """The p-value of (n,) uniforms that must not depend on (n,) others, drawn before them: counts of pairs of bins."""
    if len(first) < _BINS * _BINS * 5:
        return None
    bins = [np.minimum((one * _BINS).astype(np.int64), _BINS - 1) for one in (first, second)]
    table = np.bincount(bins[0] * _BINS + bins[1], minlength=_BINS * _BINS).reshape(_BINS, _BINS)
    expected = table.sum(axis=1, keepdims=True) / _BINS
    statistic = float(((table - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    return chi_squared_tail(statistic, _BINS * (_BINS - 1))


@dataclass(frozen=True)
class Accusation:
    """A test that failed on both halves: its name, and the p-value (corrected for all tests) of the second half."""

    test: str
    p: float


def accusations(
    screened: Mapping[str, float], confirmed: Mapping[str, float], broad: Collection[str]
) -> list[Accusation]:
    """The tests that failed on both halves, the clearest first; p-values by test.

    Both steps are Bonferroni's. The first is over all tests, of which the few `broad` ones together have half of the
    level, and all others the other half; the second is over those that failed the first time.
    """
    sizes = {True: sum(name in broad for name in screened), False: sum(name not in broad for name in screened)}
    suspects = [name for name, p in screened.items() if p * 2 * sizes[name in broad] < SCREEN]
    found = [Accusation(name, min(1.0, confirmed.get(name, 1.0) * len(suspects))) for name in suspects]
    return sorted((one for one in found if one.p < CONFIRM), key=lambda one: one.p)


def needed(effect: float, degrees: int, tests: int) -> int:
    """Tokens with which one of so many broad `tests`, of these degrees of freedom, finds a total variation `effect`.

    With a chance of 90 %, on each half. Σ d²/p ≥ 4 effect² for every difference d of that size, whatever it is, so no
    other shape of it takes more tokens; the noncentral law is taken as normal (Patnaik 1949).
    """
    alpha = SCREEN / 2 / tests
    # The critical value by Wilson and Hilferty, then λ with (critical − degrees − λ) = −1.28 sqrt(2 (degrees + 2 λ)).
    z = float(torch.special.ndtri(torch.tensor(1 - alpha, dtype=torch.float64)))
    critical = degrees * (1 - 2 / (9 * degrees) + z * (2 / (9 * degrees)) ** 0.5) ** 3
    noncentral = max(critical - degrees, 1.0)
    for _ in range(50):
        noncentral = critical - degrees + 1.2816 * (2 * (degrees + 2 * noncentral)) ** 0.5
    return 2 * int(np.ceil(noncentral / (4 * effect**2)))
