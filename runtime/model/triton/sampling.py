"""The token that each row of logits gives, chosen where the logits are: the argmax, or `coupled`'s sample.

What sampling.Distributions and noise.race say, for sampling that is `plain`, with every step such that a row's choice
does not depend on the rows beside it: maxima, elementwise float64, and sums of integers. Between this and the CPU's
choice there is rounding only (of exp, of the nucleus' border), which no text would show in a lifetime, but which makes
them two sources: one engine takes one of them for all of a request's tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.kernels.triton.argmax import largest
from runtime.kernels.triton.philox import uniforms
from runtime.model.on_device import NON_FINITE, RowSampling
from runtime.sampling.candidates import Candidates
from runtime.sampling.noise import Stream
from runtime.sampling.params import Sampling

# Rows whose float64 probabilities are held at once.
_ROWS = 32
# Weights of at most 1 are counted in units of 2⁻⁴⁴, so that integers hold the sum of 2¹⁹ of them.
_UNITS = 2.0**44


def next_tokens(logits: Tensor, asked: Sequence[RowSampling], limit: int | None = None) -> Tensor:
    """The token of each row, on the logits' device, without waiting for it.

    logits  (n, V) float32; a row with a NaN, an infinity or nothing above −inf gives NON_FINITE.
    asked   n of them; greedy sampling takes the argmax, the first of equals, and never looks at the position.
    limit   only tokens below it take part (None: all).

    Returns (n,) int64. Raises ValueError for sampling that is not `plain`, and as many `asked` as there are not rows.
    """
    if len(asked) != len(logits) or not all(one.sampling.plain for one in asked):
        raise ValueError(f"{len(logits)} rows, {len(asked)} ways to choose, all of which must be plain")
    if not len(logits):
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    best = out = largest(logits, limit)
    known = logits[:, :limit]
    sampled = [i for i, one in enumerate(asked) if not one.sampling.greedy]
    for first in range(0, len(sampled), _ROWS):
        rows = sampled[first : first + _ROWS]
        whole = rows == [*range(len(logits))]
        at = torch.tensor(rows).to(logits.device, non_blocking=True)
        chosen = _lots(known if whole else known[at], [asked[i] for i in rows]).argmax(dim=-1)
        out = chosen if whole else out.index_copy(0, at, chosen)
    return out.masked_fill(best == NON_FINITE, NON_FINITE)


class Way(NamedTuple):
    """What rows that are sampled alike have in common: all but the noise."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


# The probabilities by which a greedy row's tokens are ranked.
_AS_THEY_ARE = Way(1.0, 0, 1.0, 0.0)


def way_of(sampling: Sampling) -> Way | None:
    """How a `plain` sampling chooses; None: greedy."""
    return None if sampling.greedy else Way(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def key_of(sampling: Sampling, position: int) -> tuple[int, int]:
    """What a token's noise is made of, as int64 holds it: the seed, below 2**64, and the token's position."""
    seed = sampling.seed
    return seed - (1 << 64) if seed >= 1 << 63 else seed, position


def sample_alike(logits: Tensor, way: Way | None, keys: Tensor | None, limit: int) -> Tensor:
    """`next_tokens` of (n, V) rows, all greedy or all sampled in one way: launches only, so that graphs hold them.

    keys  (n, 2) int64 on the logits' device, by `key_of`; None for greedy rows.
    """
    best = largest(logits, limit)
    if way is None:
        return best
    assert keys is not None
    pieces = zip(logits[:, :limit].split(_ROWS), keys.split(_ROWS), strict=True)
    out = torch.cat([(_weights(rows, *way) / _noise(of, limit)).argmax(dim=-1) for rows, of in pieces])
    return out.masked_fill(best == NON_FINITE, NON_FINITE)


def candidates(logits: Tensor, asked: Sequence[RowSampling], count: int, limit: int) -> list[Candidates | None]:
    """See on_device.DeviceRounds; waits for the device once."""
    found = []
    for first in range(0, len(logits), _ROWS):
        rows = slice(first, first + _ROWS)
        left = _lots(logits[rows, :limit], asked[rows])
        total = left.sum(dim=-1, keepdim=True)
        columns = [largest(logits[rows]).double().unsqueeze(1)]
        for _ in range(min(count, left.shape[1])):
            # The first of equals, which a sort for the largest would not promise.
            at = left.argmax(dim=-1, keepdim=True)
            columns += [at.double(), left.gather(1, at) / total]
            left.scatter_(1, at, 0.0)
        found.append(torch.cat(columns, dim=1))
    # float64 holds the tokens, too: all is one copy.
    read = torch.cat(found).tolist() if found else []
    return [None if best == NON_FINITE else _candidates(rest[::2], rest[1::2]) for best, *rest in read]


def _candidates(tokens: Sequence[float], shares: Sequence[float]) -> Candidates:
    """Without those of weight 0, which come last."""
    some = [share for share in shares if share > 0]
    return Candidates([int(token) for token in tokens[: len(some)]], some, some)


def _lots(logits: Tensor, asked: Sequence[RowSampling]) -> Tensor:
    """(n, V) float64 w / exponential noise, where w are probabilities but for a row's factor; of greedy rows w."""
    device, n = logits.device, len(asked)
    ways = [way_of(one.sampling) for one in asked]
    weights = torch.empty(logits.shape, dtype=torch.float64, device=device)
    for way in dict.fromkeys(ways):
        rows = [i for i, other in enumerate(ways) if other == way]
        at = torch.tensor(rows).to(device, non_blocking=True)
        part = logits if len(rows) == n else logits[at]
        lots = _weights(part, *(way or _AS_THEY_ARE))
        if way is not None:
            keys = torch.tensor([key_of(asked[i].sampling, asked[i].position) for i in rows])
            lots = lots / _noise(keys.to(device, non_blocking=True), logits.shape[1])
        weights = lots if len(rows) == n else weights.index_copy_(0, at, lots)
    return weights


def _noise(keys: Tensor, count: int) -> Tensor:
    """(n, count) float64, exponential."""
    return uniforms(keys, count, Stream.CHOICE).log_().neg_()


def _weights(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """(n, V) float64 probabilities over those of the most probable token; processors.py has the steps' meaning."""
    scores = logits.double()
    highest = scores.amax(dim=-1, keepdim=True)
    if 0 < top_k < scores.shape[1]:
        least = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    weights = ((scores - highest) / temperature).exp_()
    if top_p < 1:
        ordered = weights.sort(dim=-1).values
        units = (ordered * _UNITS).to(torch.int64).cumsum(dim=-1)
        spare = (units[:, -1:].double() * (1 - top_p)).to(torch.int64)
        dropped = (units <= spare).sum(dim=-1, keepdim=True).clamp_(max=scores.shape[1] - 1)
        weights = weights.masked_fill(weights < ordered.gather(1, dropped), 0.0)
    return weights.masked_fill(weights < min_p, 0.0) if min_p > 0 else weights
