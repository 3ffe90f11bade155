"""The token that each row of logits gives, chosen where the logits are: the argmax, or `coupled`'s sample.

What sampling.Distributions and noise.race say, for sampling that is `plain`, with every step such that a row's choice
does not depend on the rows beside it: maxima, elementwise float64, and sums of integers. Between this and the CPU's
choice there is rounding only (of exp, of the nucleus' border), which no text would show in a lifetime, but which makes
them two sources: one engine takes one of them for all of a request's tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.device_rounds import BROKEN, Asked
from runtime.noise import Stream

# Rows whose float64 probabilities are held at once.
_ROWS = 32
# Weights of at most 1 are counted in units of 2⁻⁴⁴, so that integers hold the sum of 2¹⁹ of them.
_UNITS = 2.0**44


def choices(logits: Tensor, asked: Sequence[Asked], limit: int | None = None) -> Tensor:
    """The token of each row, on the logits' device, without waiting for it.

    logits  (n, V) float32; a row with a NaN, an infinity or nothing above −inf gives BROKEN.
    asked   n of them; greedy sampling takes the argmax, the first of equals, and never looks at the position.
    limit   only tokens below it take part (None: all).

    Returns (n,) int64. Raises ValueError for sampling that is not `plain`, and as many `asked` as there are not rows.
    """
    if len(asked) != len(logits) or not all(one.sampling.plain for one in asked):
        raise ValueError(f"{len(logits)} rows, {len(asked)} ways to choose, all of which must be plain")
    if not len(logits):
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    highest = logits.amax(dim=-1)
    known = logits[:, :limit]
    out = known.argmax(dim=-1)
    sampled = [i for i, one in enumerate(asked) if not one.sampling.greedy]
    for first in range(0, len(sampled), _ROWS):
        rows = sampled[first : first + _ROWS]
        whole = rows == [*range(len(logits))]
        at = torch.tensor(rows).to(logits.device, non_blocking=True)
        chosen = _race(known if whole else known[at], [asked[i] for i in rows])
        out = chosen if whole else out.index_copy(0, at, chosen)
    sound = torch.isfinite(highest) & torch.isfinite(known.amax(dim=-1))
    return out.masked_fill(~sound, BROKEN)


def _race(logits: Tensor, asked: Sequence[Asked]) -> Tensor:
    """argmax(w / exponential noise) of each row, where w are probabilities but for a factor."""
    from runtime.kernels.triton.uniforms import uniforms

    device, n = logits.device, len(asked)
    keys = torch.tensor([[_signed(one.sampling.seed), one.position] for one in asked]).to(device, non_blocking=True)
    noise = uniforms(keys, logits.shape[1], Stream.CHOICE).log_().neg_()
    settings = [(a.sampling.temperature, a.sampling.top_k, a.sampling.top_p, a.sampling.min_p) for a in asked]
    weights = torch.empty(logits.shape, dtype=torch.float64, device=device)
    for setting in dict.fromkeys(settings):
        rows = [i for i, other in enumerate(settings) if other == setting]
        if len(rows) == n:
            weights = _weights(logits, *setting)
        else:
            at = torch.tensor(rows).to(device, non_blocking=True)
            weights.index_copy_(0, at, _weights(logits[at], *setting))
    return (weights / noise).argmax(dim=-1)


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


def _signed(seed: int) -> int:
    """A seed below 2**64 as int64 holds it."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
