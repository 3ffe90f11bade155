"""Numbers with the distance at which float32 arithmetic may lie from them: the bound that the logits come with.

A ball is a row of float64 numbers x with two radii: whatever decoder in float32 made the same discrete choices has its
own row within e of x number by number, and within r of x in the Euclidean norm. Both are carried, because each is the
narrow one somewhere: e where inputs are rounded to codes, r through matrices of floats. Radii follow from the formats
and the operations alone, nothing is fitted:

* One operation of IEEE float32 has a relative error of at most u = 2^-24 (round to nearest; no test comes near
  float32's smallest normal number). Sums of n products in any order, fused or not, are within
  γ(n) Σ|a||b|, γ(n) = n u / (1 − n u) (Higham, Accuracy and Stability, 2002, lemma 3.1 and section 3.1).
* A function's own error is taken at the other decoder's input, which is within our radii: hence terms (|y| + a), where
  a is how far the function carries the input's radius. A matrix of floats carries r by its spectral norm and e by
  its absolute values, a norm carries them by 1 / (root mean square − r / √K), an activation by its largest slope, and
  attention as `attention` says.
* Rounded inputs. Codes are integers, and so are their products: exact on both sides where the codes are the same. What
  is left is the step, absmax / 127: its relative error is that of absmax, at most max(e) / absmax + 2u.

A code is a choice: x / step near a half may be rounded either way. `Choices` follows the decoder there, and only there:
a code may be the other one where the distance from the half is below what the radius allows, and is counted. What a
cache holds can be read, so that it is taken as it is, and each number is checked: one within the radius of ours has to
be rounded to it. A row's choices then show in that row alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tests.oracle.files import Array, U, Weight

# Largest slopes: silu's is 1.0999 (at 2.4), gelu's in the tanh form 1.1291.
_SLOPES = {"silu": 1.1, "gelu_pytorch_tanh": 1.13}


def gamma(n: float) -> float:
    """Higham's γ: what n roundings in a row come to."""
    return n * U / (1 - n * U)


def norm(x: Array) -> Array:
    """Euclidean, over the last dimension."""
    return np.linalg.norm(x, axis=-1)


class Ball:
    """x (…, n), e (…, n) and r (…): each radius is made as narrow as the other one says."""

    def __init__(self, x: Array, e: Array, r: Array | None = None):
        size = norm(e)
        self.x, self.r = x, size if r is None else np.minimum(r, size)
        self.e = np.minimum(e, self.r[..., None])

    def __add__(self, other: "Ball") -> "Ball":
        x, e, r = self.x + other.x, self.e + other.e, self.r + other.r
        return Ball(x, e + U * (np.abs(x) + e), r + U * (norm(x) + r))

    def columns(self, part: slice) -> "Ball":
        """Some of the numbers."""
        return Ball(self.x[..., part], self.e[..., part], self.r)

    def heads(self, d: int) -> "Ball":
        """(T, n) as (T, n / d, d); r holds for each head."""
        shape = (len(self.x), -1, d)
        x = self.x.reshape(shape)
        return Ball(x, self.e.reshape(shape), np.repeat(self.r[:, None], x.shape[1], axis=1))


Choice = tuple[str, int, tuple[float, float]]
"""What is rounded: the site, the row, and the number's size and step. Equal ones are one choice: they round alike."""


@dataclass
class Choices:
    """Codes that are to be the other one of the two nearest; and after a forward all that could be.

    given  site → what a cache holds there (T, heads, d): codes, or floats as they are.
    near   choice → distance from the half over what is allowed: below 1.
    sure   rows of mixtures whose experts the scores' errors leave no choice of, and all rows of mixtures.
    windows, start  which choices in `near` each of `off` depends on, first and last; the first for what comes next.
    off    (T, n) each: how far a row's numbers are from all that round to what is given, over what is allowed.
    """

    other: frozenset[Choice] = frozenset()
    given: Mapping[str, Array] = field(default_factory=dict)
    near: dict[Choice, float] = field(default_factory=dict)
    off: list[Array] = field(default_factory=list)
    sure: list[tuple[int, int]] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)
    start: int = 0

    def check(self, x: Array, low: Array, high: Array, slack: Array, pins: bool = False) -> None:
        """Notes in `off` how far x (T, …) is from low … high, what is rounded to what is given; slack as in `round`.

        pins  what follows is computed of what is given, so that choices made before show nowhere else.
        """
        out = np.maximum(np.maximum(low - x, x - high), 0)
        over = np.divide(out, slack, out=np.where(out > 0, np.inf, 0.0), where=slack > 0)
        self.off.append(over.reshape(len(x), -1))
        self.windows.append((self.start, len(self.near)))
        self.start = len(self.near) if pins else self.start

    def round(self, site: str, x: Array, step: Array, slack: Array, limit: float) -> Array:
        """Codes of x (T, n) / step (T, n); slack (T, n): how far another decoder's quotients may lie."""
        # What is one number in float32 has to round alike where it lies on the half. Six places move quotients by 5e-7.
        t = np.round(np.divide(np.abs(x), step, out=np.zeros_like(x), where=step > 0), 6)
        slack = slack + 5e-7
        codes = np.rint(t)
        distance = 0.5 - np.abs(t - codes)
        for row, place in zip(*np.nonzero((distance < slack) & (t < limit)), strict=True):
            choice = (site, int(row), (_digits(abs(x[row, place])), _digits(step[row, place])))
            self.near[choice] = float(distance[row, place] / slack[row, place])
            if choice in self.other:
                codes[row, place] += 1 if t[row, place] > codes[row, place] else -1
        return np.copysign(np.minimum(codes, limit), x)

    def top(self, site: str, scores: Ball, k: int) -> Array:
        """(T, k) experts of the largest scores (T, E), which ours takes after a softmax in float32.

        Expert i may be left out for j where their scores differ by no more than both errors, what the softmax rounds
        off each (the difference from the largest, e^x within 4u, a quotient) included.
        """
        chosen = np.argsort(-scores.x, axis=1, kind="stable")[:, :k]
        slack = scores.e + U * (np.ptp(scores.x, axis=1, keepdims=True) + 2 * scores.e) + gamma(6)
        open_rows = set()
        for row, mine in enumerate(chosen):
            for place, i in enumerate(mine):
                for j in np.setdiff1d(np.arange(scores.x.shape[1]), mine):
                    gap, allowed = scores.x[row, i] - scores.x[row, j], slack[row, i] + slack[row, j]
                    if gap > allowed:
                        continue
                    choice = (f"{site} experts", row, (float(i), float(j)))
                    self.near[choice] = float(gap / allowed)
                    open_rows.add(row)
                    if choice in self.other:
                        chosen[row, place] = j
        self.sure.append((len(chosen) - len(open_rows), len(chosen)))
        return chosen


def _digits(value: float) -> float:
    return float(f"{value:.10g}")


def _ratio(a: Array, b: Array) -> Array:
    """a / b, 0 where b is."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape)), where=np.broadcast_to(b > 0, a.shape))


def steps(x: Array, e: Array, limit: float) -> tuple[Array, Array, Array]:
    """Steps (…, 1) of numbers (…, n) by their absmax, their relative errors, and the slack (…, n) of the quotients."""
    absmax = np.abs(x).max(axis=-1, keepdims=True)
    step, error = absmax / limit, _ratio(e.max(axis=-1, keepdims=True), absmax) + 2 * U
    # Ours multiplies by the inverse: two more roundings.
    return step, error, _ratio(e, step) + _ratio(np.abs(x), step) * (error + 2 * U)


def quantize(ball: Ball, groups: int, choices: Choices, site: str) -> tuple[Array, Array, Array]:
    """Symmetric codes (T, n) of a ball (T, n), steps (T, groups) and their relative errors, by each group's absmax."""
    parts, shape = (len(ball.x), groups, -1), ball.x.shape
    step, error, slack = steps(ball.x.reshape(parts), ball.e.reshape(parts), 127)
    wide = np.broadcast_to(step, slack.shape).reshape(shape)
    return choices.round(site, ball.x, wide, slack.reshape(shape), 127), step[..., 0], error[..., 0]


def linear(ball: Ball, weight: Weight, choices: Choices, site: str) -> Ball:
    """x Wᵀ + b."""
    if weight.scale is None:
        return _float(ball, weight)
    if weight.order is not None:
        ball = Ball(ball.x[:, weight.order], ball.e[:, weight.order], ball.r)
    (n, groups), count = weight.scale.shape, len(ball.x)
    if weight.step is None:
        # Layers of one input share its codes where they share the step, whatever their groups and order.
        codes, step, error = quantize(ball, groups, choices, site)
    else:
        step, error = np.full((count, groups), weight.step), np.zeros((count, groups))
        slack, wide = ball.e / weight.step + U * np.abs(ball.x / weight.step), np.full_like(ball.x, weight.step)
        codes = choices.round(f"{site} {weight.step}", ball.x, wide, slack, 127)
    split = codes.reshape(count, groups, -1)
    sums = np.einsum("tgk,ngk->tng", split, weight.codes.reshape(n, groups, -1)) * weight.scale
    minus = np.zeros((1, n, groups)) if weight.offset is None else split.sum(-1)[:, None] * weight.offset
    terms, sizes = (sums - minus) * step[:, None], (np.abs(sums) + np.abs(minus)) * step[:, None]
    # To float, times scale; the offset's own product and the sum's; the difference; times step; one sum over groups.
    rounding = (1 + gamma(groups + 7)) * (1 + weight.loose) - 1
    far = (sizes * rounding * (1 + error[:, None]) + np.abs(terms) * error[:, None]).sum(-1)
    return _biased(Ball(terms.sum(-1), far), weight.bias)


def _float(ball: Ball, weight: Weight) -> Ball:
    w, sizes = weight.codes, np.abs(weight.codes)
    carried = ball.e @ sizes.T
    loose = (1 + gamma(w.shape[1] + 1)) * (1 + weight.loose) - 1
    own = loose * (np.abs(ball.x) @ sizes.T + carried)
    carried = np.minimum(carried, ball.r[:, None] * norm(w))
    made = Ball(ball.x @ w.T, carried + own, ball.r * np.linalg.norm(w, 2) + norm(own))
    return _biased(made, weight.bias)


def _biased(ball: Ball, bias: Array | None) -> Ball:
    return ball if bias is None else ball + Ball(np.broadcast_to(bias, ball.x.shape), U * np.abs(bias) + 0 * ball.x)


def rms_norm(ball: Ball, weight: Array, eps: float) -> Ball:
    """x / sqrt(mean(x²) + eps) · weight; squares are added by halving, ⌈log2 K⌉ deep."""
    k = ball.x.shape[-1]
    square = (ball.x**2).mean(axis=-1)
    root = np.sqrt(square + eps)
    least = np.sqrt(np.maximum(np.sqrt(square) - ball.r / k**0.5, 0) ** 2 + eps)
    y = ball.x / root[..., None] * weight
    turned = ball.r / k**0.5 / (least * root)
    carried = np.abs(weight) * (ball.e / least[..., None] + np.abs(ball.x) * turned[..., None])
    along = np.abs(weight).max() * ball.r / least
    own = _norm_rounding(k)
    return Ball(y, carried + own * (np.abs(y) + carried), along + own * (norm(y) + along))


def _norm_rounding(k: int) -> float:
    # Squares, their sum, the mean and eps go through a root, which halves them; then root, inverse and three products.
    return gamma((np.ceil(np.log2(k)) + 3) / 2 + 6)


# What `between` knows to be added to the first number of the stream.
PROBE = 16.0


def between(hidden: Array, probed: Array, weight: Array) -> tuple[Ball, Ball, Array]:
    """What x (T, K) is, x / c with c = sqrt(mean(x²) + eps), and c (T, 1), of two norms with `weight`.

    hidden, probed  the norms of x, and of x with PROBE added to its first number.

    hidden / weight is x / c number by number, to within a norm's roundings. That is the direction; c follows from the
    other one: of its numbers 0 and j the quotient is (x_0 + PROBE) / x_j; times x_j / c that is PROBE / c more than
    x_0 / c.
    """
    own = _norm_rounding(hidden.shape[-1]) * (1 + 1e-4)
    unit = hidden / weight
    largest = 1 + np.abs(unit[:, 1:]).argmax(axis=1, keepdims=True)
    first, other = (np.take_along_axis(probed / weight, at, axis=1) for at in (0 * largest, largest))
    sum_ = np.take_along_axis(unit, largest, axis=1) * first / other
    gap = sum_ - unit[:, :1]
    # Three norms' roundings, the sum's with PROBE.
    loose = (np.abs(sum_) * (3 * own + 2 * U) + own * np.abs(unit[:, :1])) / np.abs(gap) * (1 + 1e-4)
    length = PROBE / gap
    x = length * unit
    return Ball(x, np.abs(x) * (loose + own) * (1 + 1e-4)), Ball(unit, own * np.abs(unit)), length


def scaled(unit: Ball, weight: Array) -> Ball:
    """The norm with a weight of what `between` gave, computed in float32 from the numbers themselves."""
    y, own = unit.x * weight, _norm_rounding(unit.x.shape[-1])
    carried = np.abs(weight) * unit.e
    return Ball(y, carried + own * (np.abs(y) + carried))


def gated(gate: Ball, up: Ball, kind: str) -> Ball:
    """act(gate) · up."""
    x, size = gate.x, np.abs(gate.x)
    carried = _SLOPES[kind] * gate.e
    if kind == "silu":
        act = x / (1 + np.exp(-x))
        # e^−x within two units in the last place (4u), sum, quotient, product.
        e = carried + gamma(8) * (np.abs(act) + carried)
    else:
        act = 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
        # The argument z within 7u, times |z| tanh'(z) < 0.45; tanh from e^2z: 4u / 2, a quotient, a difference: 7u.
        e = carried + gamma(6) * (size + gate.e) + gamma(3) * (np.abs(act) + carried)
    y = act * up.x
    far = np.abs(act) * up.e + np.abs(up.x) * e + e * up.e
    return Ball(y, far + U * (np.abs(y) + far))


def rotate(ball: Ball, cos: Array, sin: Array, far: Array) -> Ball:
    """Rotary embedding of a ball (T, heads, d): cos, sin and their errors (T, half)."""
    half = cos.shape[-1]
    c, s, f = cos[:, None], sin[:, None], far[:, None]

    def parts(values: Array) -> tuple[Array, Array, Array]:
        return values[..., :half], values[..., half : 2 * half], values[..., 2 * half :]

    (a, b, rest), (ea, eb, same) = parts(ball.x), parts(ball.e)
    y = np.concatenate((a * c - b * s, b * c + a * s, rest), axis=-1)
    own = (np.abs(a) + ea + np.abs(b) + eb) * (f + gamma(2) * (np.abs(c) + np.abs(s) + f))
    carried = np.abs(c) * ea + np.abs(s) * eb, np.abs(c) * eb + np.abs(s) * ea
    own = np.concatenate((own, own, 0 * rest), axis=-1)
    stretch = np.maximum(1, np.sqrt(cos**2 + sin**2).max(axis=-1))
    return Ball(y, np.concatenate((*carried, same), axis=-1) + own, ball.r * stretch[:, None] + norm(own))


def attention(q: Ball, k: Ball, v: Ball, window: int | None) -> Ball:
    """Causal softmax attention: q (T, heads, d), k and v (T, kv_heads, d) to (T, heads · d).

    A score's error D moves a weight by a factor within e^±2D, and the weights still add up to 1: so the output moves by
    at most (e^2D − 1) Σ p |v − out|, and by what the values do.
    """
    (count, heads, d), kv_heads = q.x.shape, k.x.shape[1]
    scaling, out, far = d**-0.5, np.zeros(q.x.shape), np.zeros(q.x.shape)
    for row in range(count):
        seen = slice(0 if window is None else max(0, row - window + 1), row + 1)
        n = seen.stop - seen.start
        for head in range(heads):
            at = head // (heads // kv_heads)
            keys, values, query = k.x[seen, at], v.x[seen, at], q.x[row, head]
            key_e, value_e, query_e = k.e[seen, at], v.e[seen, at], q.e[row, head]
            scores = keys @ query * scaling
            sizes = (np.abs(keys) + key_e) @ (np.abs(query) + query_e)
            moved = np.abs(keys) @ query_e + key_e @ (np.abs(query) + query_e)
            by_norm = q.r[row, head] * norm(keys) + k.r[seen, at] * (norm(query) + q.r[row, head])
            moved = scaling * (np.minimum(moved, by_norm) + gamma(d + 3) * sizes)
            spread = scores.max() - scores
            p = np.exp(-spread)
            p /= p.sum()
            # The difference from the largest is rounded once; e^x is within 4u.
            wide = np.exp(2 * (moved.max() + U * (spread.max() + 2 * moved.max())) + gamma(8))
            out[row, head] = mixed = p @ values
            own = gamma(2 * n + 8) * wide * (p @ (np.abs(values) + value_e))
            far[row, head] = (wide - 1) * (p @ np.abs(values - mixed)) + wide * (p @ value_e) + own
    return Ball(out.reshape(count, -1), far.reshape(count, -1))
