"""Keys and values in a basis of their head: into it before they are rounded, and how rounding goes in it.

A key is stored as k · `into`, a value likewise; a query meets it as q · `back`, and what attention mixes of the values
comes back as mixed · `back`. So scores and outputs are what they would be, but for rounding. A basis turns a head's
dimensions into each other, so that none of them stands out, and gives those that matter less a coarser step
(compress/quantize/cache_basis.py makes it).

Codes are found from the last to the first, and each makes up for the errors of those behind it, as in GPTQ
(2210.17323): with t the row over its scale and c the codes,
c[i] = round(t[i] + Σ_{j > i} (t[j] − c[j]) · feedback[j, i]), c being what codes stand for (kv_store.Levels). The
first 20 are rounded to halves, whose last bits lie in the scale's word. A scale has a sign: the row's extreme lies on
the side that has a code more. Its short form and the next smaller ones are tried, and the first that loses least is
taken. Every sum has one order, in float32 without fused products, so native/basis.cpp has the same bits.
"""

import torch
from torch import Tensor

from runtime.kv_store import HALVES, SCALE_BITS, Levels, halves_of, scale_of, with_halves

INTO, FEEDBACK, BACK = 0, 1, 2
# Scales that are tried for each row.
TRIED = 3
_STEP = 1 << HALVES
_INFINITE = 0x7F800000


def turned(x: Tensor, matrices: Tensor) -> Tensor:
    """x · matrix of rows (n, heads, d) float32 by (kv_heads, d, d), each for heads / kv_heads adjacent heads."""
    per_head = matrices.repeat_interleave(x.shape[1] // len(matrices), dim=0)
    out = torch.zeros_like(x)
    for j in range(x.shape[-1]):
        out = out + x[..., j : j + 1] * per_head[:, j]
    return out


def round_signed(x: Tensor, signed: tuple[float, int]) -> tuple[Tensor, Tensor]:
    """Codes (n, heads, d) int8 of rows x (n, heads, d) float32, and their scales (n, heads), which may be negative.

    signed  what the extreme of a row is of its scale, and the number of codes below 0 (kv_store.SIGNED).

    A row of zeros has scale 0; one with a NaN has the scale NaN and codes 0.
    """
    limit, half = signed
    scale = _extreme(x) / limit
    codes = (x * _inverse(scale).unsqueeze(-1)).round().clamp(float(-half), float(half - 1))
    return codes.nan_to_num(0.0).to(torch.int8), scale


def round_in_basis(x: Tensor, levels: Levels, basis: Tensor) -> tuple[Tensor, Tensor]:
    """`round_signed` in a basis (heads, 3, d, d) float32: codes without their halves, which are in the scales.

    A row whose scale is NaN, infinite or below 2^-129 has codes 0.
    """
    x = turned(x, basis[:, INTO])
    longest = (_extreme(x) / levels.limit).view(torch.int32)
    # Away from zero, so that the first one cuts nothing off.
    cut = (longest & ~SCALE_BITS != 0) & (longest & _INFINITE != _INFINITE)
    words = (longest + cut.int() * _STEP) & SCALE_BITS
    codes, scale = torch.empty_like(x), torch.empty_like(words)
    least = torch.empty(words.shape, device=x.device)
    for tried in range(TRIED):
        # NaN, infinities and what would come to have another sign stay.
        kept = (words & _INFINITE == _INFINITE) | (words & 0x7FFFFFFF < tried * _STEP)
        word = torch.where(kept, words, words - tried * _STEP)
        found, cost = _coded(x, word.view(torch.float32), levels, basis[:, FEEDBACK])
        better = cost < least if tried else torch.ones_like(kept)
        codes = torch.where(better.unsqueeze(-1), found, codes)
        scale, least = torch.where(better, word, scale), torch.where(better, cost, least)
    whole = codes.floor()
    return whole.to(torch.int8), with_halves(scale.view(torch.float32), (codes != whole)[..., :HALVES])


def rounded_back(codes: Tensor, scales: Tensor, knee: float) -> Tensor:
    """What `round_in_basis` made of rows, in the basis: (n, heads, d) float32."""
    return level(codes.float() + halves_of(scales, codes.shape[-1]), knee) * scale_of(scales).unsqueeze(-1)


def level(codes: Tensor, knee: float) -> Tensor:
    """What codes (…,) float32, halves among them, stand for, over their scale; exact, in float16 too."""
    return codes + (codes - codes.clamp(-knee, knee))


def _coded(x: Tensor, scale: Tensor, levels: Levels, feedback: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (n, heads, d), halves among them, of rows by scales (n, heads); and what they lose, (n, heads): the sum of
    what each is beside what it was to be, squared, where a half's step counts as one."""
    open_ = x * _inverse(scale).unsqueeze(-1)
    left, codes, cost = open_.clone(), torch.empty_like(open_), torch.zeros_like(scale)
    for i in reversed(range(x.shape[-1])):
        fine = 2.0 if i < HALVES else 1.0
        wanted = left[..., i]
        within = (wanted + wanted.clamp(-levels.knee, levels.knee)) * 0.5
        code = (within * fine).round().clamp(-levels.half * fine, levels.half * fine - 1).nan_to_num(0.0)
        found, nearer = code / fine, (code - code.sign()) / fine
        missed, beside = (wanted - level(one, levels.knee) for one in (found, nearer))
        # Where steps change, the code before it may be the nearest.
        before = beside.abs() < missed.abs()
        missed = torch.where(before, beside, missed)
        cost = cost + (missed * fine) * (missed * fine)
        codes[..., i] = torch.where(before, nearer, found)
        left[..., :i] += (open_[..., i] - level(codes[..., i], levels.knee)).unsqueeze(-1) * feedback[:, i, :i]
    return codes, cost * (scale * scale)


def _extreme(x: Tensor) -> Tensor:
    """The number of largest magnitude of each row, of two the positive one."""
    highest, lowest = x.amax(-1).clamp_min(0.0), x.amin(-1).clamp_max(0.0)
    return torch.where(highest >= -lowest, highest, lowest)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale; 0 where it is no finite number: such a row is zero for every purpose."""
    inverse = torch.where(scale != 0, 1.0 / scale, torch.zeros_like(scale))
    return torch.where(torch.isinf(inverse), torch.zeros_like(inverse), inverse)
