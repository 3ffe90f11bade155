"""What wrong rules make of a distribution: where to look for their biases, which other tests see only with many tokens.

A rule draws x from the draft's q, accepts it with min(1, p / q), and otherwise draws from r = norm(max(p − q, 0)). The
functions give the distribution (n, C) of the token that a wrong form of it leads to, from p and q (n, C).
"""

import numpy as np

from runtime.audit.known import Array

_NODES, _WEIGHTS = np.polynomial.laguerre.laggauss(6)


def directions(p: Array, q: Array) -> dict[str, Array]:
    """By name: the distributions of wrong rules."""
    kept = np.minimum(p, q)
    lost = 1 - kept.sum(axis=-1, keepdims=True)
    r = np.maximum(p - q, 0.0)
    # p = q: nothing is ever rejected, and r does not matter.
    r = np.where(lost > 1e-12, r / np.maximum(r.sum(axis=-1, keepdims=True), 1e-300), p)
    return {
        "the draft's distribution": q,
        "the target's after a rejection": kept + lost * p,
        "a rejected draft's noise again": kept + _inverted_again(p, q, r),
        "a rejected draft's Gumbel noise again": kept + lost * _raced_again(q, r),
    }


def _inverted_again(p: Array, q: Array, r: Array) -> Array:
    """Draws from q and from r by inversion with the same uniform; the part of it where q's token is rejected."""
    upto_q, upto_r = (np.minimum(np.cumsum(one, axis=-1), 1.0) for one in (q, r))
    ends = np.sort(np.concatenate([upto_q, upto_r], axis=-1), axis=-1)
    widths = np.diff(ends, axis=-1, prepend=0.0)
    middles = ends - widths / 2
    count = q.shape[-1]
    x, y = (np.minimum((upto[:, None] <= middles[..., None]).sum(axis=-1), count - 1) for upto in (upto_q, upto_r))
    rejected = np.maximum(1 - p / np.maximum(q, 1e-300), 0.0)
    weights = widths * np.take_along_axis(rejected, x, axis=-1)
    cells = np.arange(len(p))[:, None] * count + y
    found: Array = np.zeros(p.size)
    np.add.at(found, cells.ravel(), weights.ravel())
    return found.reshape(p.shape)


def _raced_again(q: Array, r: Array) -> Array:
    """Draws from r with the Gumbel noise from which q's token came, which was another than r's.

    As a race of exponentials: q's winner came in at M ~ Exp(1), so that all others come in later, token y at q M plus
    an exponential, over r. Its distribution is integrated over M by Gauss and Laguerre, and over time exactly.
    """
    found = np.zeros_like(r)
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        starts = np.where(r > 0, q * node / np.maximum(r, 1e-300), np.inf)
        order = np.argsort(starts, axis=-1)
        rates, begins = (np.take_along_axis(one, order, axis=-1) for one in (r, starts))
        begins = np.where(np.isfinite(begins), begins, 1e9)
        hazards = np.maximum(np.cumsum(rates, axis=-1), 1e-300)
        spans = np.diff(begins, axis=-1, append=np.inf)
        passed = hazards * spans
        survival = np.exp(-np.concatenate([np.zeros_like(r[:, :1]), np.cumsum(passed[:, :-1], axis=-1)], axis=-1))
        shares = survival * -np.expm1(-passed) / hazards
        later = np.flip(np.cumsum(np.flip(shares, axis=-1), axis=-1), axis=-1)
        won = np.zeros_like(r)
        np.put_along_axis(won, order, rates * later, axis=-1)
        found += weight * won
    return found
