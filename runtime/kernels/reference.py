"""The meaning of every operation of the decoder, in plain torch. All floats are float32.

A row's result is the same bits at every width and on every machine: every sum has one order (fused.py, exact.py), and
quantised products are exact integers, scaled afterwards. The native kernels give these bits.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import KINDS
from runtime.formats.tensors import divided
from runtime.kernels.exact import exp, ordered_sum, tanh, tree_sum
from runtime.kernels.fused import fused_sum, product
from runtime.kernels.joined import HoldsTensors
from runtime.kv_store import KEY_BLOCK, SPLIT

# Integers up to here are exact in float32, so a float product of small integers is an integer product.
_EXACT_FLOAT = 1 << 24
# Inputs whose products of int8, at most 128 · 128 each, add up to no more.
_EXACT_INPUTS = _EXACT_FLOAT // (128 * 128)
# The fewest rows of a product of integers on CUDA.
_CUDA_ROWS = 17
# Lanes of the native kernels' sums.
_LANES = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x (…, K) / sqrt(mean(x²) + eps) · (offset + weight); Gemma stores weight − 1 and has offset 1."""
    mean = tree_sum(x * x) / x.shape[-1]
    # torch's float32 root is not rounded as IEEE 754 says on every machine; through float64 it is.
    root = torch.sqrt((mean + eps).double()).float()
    return (x * (1.0 / root).unsqueeze(-1)) * (weight + offset if offset else weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x − mean) / sqrt(mean((x − mean)²) + eps) · weight + bias, over the last dimension of x (…, K)."""
    centred = x - (tree_sum(x) / x.shape[-1]).unsqueeze(-1)
    y = rms_norm(centred, weight, eps)
    return y if bias is None else y + bias


def capped(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap)."""
    return tanh(x / cap) * cap


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split layout: x (T, heads, d), cos and sin (T, r/2); dimensions from r on stay."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def quantize_rows(x: Tensor, limit: float = 127.0) -> tuple[Tensor, Tensor]:
    """Symmetric codes over the last dimension by absmax: codes (…, K) int8 in ±limit, scale (…,), x ≈ codes·scale.

    A row of zeros has scale 0.
    """
    scale = x.abs().amax(dim=-1) / limit
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    # A subnormal scale has an infinite inverse: such a row is zero for every purpose.
    inverse = torch.where(torch.isinf(inverse), torch.zeros_like(inverse), inverse)
    return torch.round(x * inverse.unsqueeze(-1)).clamp(-limit, limit).to(torch.int8), scale


def quantize_static(x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric codes by a given step: codes (…, K) int8 in ±127, and the step again, one for each row (…,).

    As with measured steps, a NaN must not be lost in the codes: it makes the row's step NaN.
    """
    rounded = torch.round(x / step).clamp(-127, 127).to(torch.int8)
    return rounded, torch.where(x.isnan().any(dim=-1), torch.nan, step)


def integer_product(x: Tensor, codes: Tensor) -> Tensor:
    """x (T, K) int8 times codes (K, N) int8: (T, N) int32, exact.

    CUDA's product takes more than 16 rows, and inputs and outputs in eights: others are filled with zeros there. On a
    CPU it is one of floats, in parts whose sums float32 holds: without VNNI torch's product of integers adds pairs in
    16 bits, which saturate.
    """
    if not x.is_cuda:
        parts = zip(x.split(_EXACT_INPUTS, dim=1), codes.split(_EXACT_INPUTS), strict=True)
        return torch.stack([(a.float() @ b.float()).to(torch.int32) for a, b in parts]).sum(dim=0, dtype=torch.int32)
    (rows, inputs), outputs = x.shape, codes.shape[1]
    pad = torch.nn.functional.pad
    wide = pad(x, (0, -inputs % 8, 0, max(0, _CUDA_ROWS - rows)))
    return torch._int_mm(wide, pad(codes, (0, -outputs % 8, 0, -inputs % 8)))[:rows, :outputs]


@dataclass(frozen=True)
class FloatLinear(HoldsTensors):
    """y = x Wᵀ + b. `weight` is (K, N)."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y = product(x, self.weight)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Int8Linear(HoldsTensors):
    """One scale per output row; inputs int8 per token, or with one static scale. `codes` is (K, N) for the product.

    has_planes  UpperLinear takes it.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None
    input_scale: Tensor | None
    has_planes: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        rounded, step = quantize_rows(x) if self.input_scale is None else quantize_static(x, self.input_scale)
        y = (integer_product(rounded, self.codes).float() * self.scale) * step.unsqueeze(1)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class UpperLinear(HoldsTensors):
    """An int8 layer by the upper four bits of its codes: what a nested draft runs. It holds no weights of its own."""

    whole: Int8Linear

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The whole layer's."""
        return self.whole.tensors

    def __call__(self, x: Tensor) -> Tensor:
        return replace(self.whole, codes=upper_codes(self.whole.codes))(x)


@dataclass(frozen=True)
class GroupLinear(HoldsTensors):
    """One scale per output row and group of inputs; inputs int8 per token and group, or with one static scale.

    `codes` is (G, group, N), integers in a float type that holds every sum of their products with inputs, so the float
    product is the exact integer product in any order. Groups are added first to last.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    perm: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        groups, size, _ = self.codes.shape
        if self.perm is not None:
            x = x[:, self.perm]
        x = torch.nn.functional.pad(x, (0, groups * size - x.shape[1]))
        x = x.view(-1, groups, size)
        rounded, step = quantize_rows(x) if self.input_scale is None else quantize_static(x, self.input_scale)
        columns = rounded.transpose(0, 1).to(self.codes.dtype)
        terms = torch.bmm(columns, self.codes).float() * self.scale.unsqueeze(1)
        if self.offset is not None:
            terms = terms - columns.sum(-1, keepdim=True).float() * self.offset.unsqueeze(1)
        y = ordered_sum(terms * step.t().unsqueeze(-1))
        return y if self.bias is None else y + self.bias


Linear = FloatLinear | Int8Linear | UpperLinear | GroupLinear


def float_linear(weight: Tensor, bias: Tensor | None = None) -> FloatLinear:
    """A float layer from (N, K) of any float dtype."""
    return FloatLinear(weight.float().t().contiguous(), None if bias is None else bias.float())


def upper_codes(codes: Tensor) -> Tensor:
    """int8 codes as their upper four bits tell them: of q = 16 h + l, l in 0..15, the middle 16 h + 8 (int8, ±120)."""
    return (codes >> 4) * 16 + 8


def packed_linear(weight: PackedWeight) -> FloatLinear | Int8Linear | GroupLinear:
    """The layer of a packed weight. Codes are unpacked once: at 1 (one scale per row) or 4 (in groups) bytes a weight.

    Groups whose sums float32 could not hold (of int4 more than 8,800 inputs, of int8 more than 1,032) take 8.
    Inputs of codes that are floats (fp8) are not rounded: that is a float32 layer.
    """
    kind, (n, k), size = KINDS[weight.scheme.kind], weight.shape, weight.scheme.group_size
    if kind.is_float:
        return float_linear(dequantize(weight), weight.bias)
    if not (kind.levels or size or weight.offset is not None or weight.perm is not None):
        # Not `contiguous`: it leaves a single input its old strides, by which the product would read wrong codes.
        codes = weight.codes.t().flatten().view(k, n)
        return Int8Linear(codes, weight.scale[:, 0], weight.bias, weight.input_scale, weight.planes)
    size = size or k
    codes, scale = weight.codes, weight.scale
    if kind.levels:
        codes, scale = kind.format.INT8_LEVELS.to(codes.device)[codes.long()], divided(scale, kind.levels)
    exact = torch.float32 if 127 * kind.largest * size < _EXACT_FLOAT else torch.float64
    groups = -(-k // size)
    codes = torch.nn.functional.pad(codes, (0, groups * size - k))
    laid_out = codes.view(n, groups, size).permute(1, 2, 0).to(exact).contiguous()
    offset = None if weight.offset is None else weight.offset.t().contiguous()
    return GroupLinear(laid_out, scale.t().contiguous(), offset, weight.perm, weight.bias, weight.input_scale)


def first_seen(last: Tensor, window: int | None, chunked: bool) -> Tensor:
    """The first position that rows at `last` see, or one before the text."""
    if window is None:
        return torch.zeros_like(last)
    return last // window * window if chunked else last - window + 1


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """Softmax attention of tiles of rows over their request's keys, which lie in order of their logical position.

    In splits of SPLIT positions, as native/attention.cpp: scores are fused over the dimensions, values over the keys.

    q          (tiles, TILE, heads, d): rows of one request each.
    keys       (tiles, blocks, kv_heads, KEY_BLOCK, d), values (…, v) likewise; blocks beyond a row's position may
               hold anything finite: they add exact zeros.
    positions  (tiles, TILE) int64: a row sees keys 0..position (and only the last `window` of them; or, `chunked`,
               those of its own chunk of so many).
    softcap    of the scores (0: none); sinks (heads,): scores besides, which have no values.
    Returns (tiles, TILE, heads, v).
    """
    tiles, rows, heads, d = q.shape
    of_value = values.shape[-1]
    blocks, kv_heads = keys.shape[1], keys.shape[2]
    per_kv, splits = heads // kv_heads, -(-blocks * KEY_BLOCK // SPLIT)
    # Rows and heads that read the same keys stand side by side: (…, tiles, kv_heads, rows · per_kv, …).
    grouped = (q * scaling).view(tiles, rows, kv_heads, per_kv, d).permute(4, 0, 2, 1, 3)
    grouped = grouped.reshape(d, tiles, kv_heads, rows * per_kv, 1)
    scores = fused_sum(grouped, keys.permute(4, 0, 2, 1, 3).reshape(d, tiles, kv_heads, 1, blocks * KEY_BLOCK))
    if softcap:
        scores = capped(scores, softcap)
    last = positions.unsqueeze(2).expand(-1, -1, per_kv).reshape(tiles, 1, rows * per_kv, 1)
    first = first_seen(last, window, chunked)
    at = torch.arange(blocks * KEY_BLOCK, device=q.device)
    scores = torch.where((first <= at) & (at <= last), scores, torch.full_like(scores, float("-inf")))
    scores = torch.nn.functional.pad(scores, (0, splits * SPLIT - blocks * KEY_BLOCK), value=float("-inf"))
    scores = scores.unflatten(3, (splits, SPLIT))
    begin = torch.arange(splits, device=q.device) * SPLIT
    seen = (begin <= last) & (first < begin + SPLIT)
    highest = scores.amax(dim=4)
    weights = exp(scores - torch.where(seen, highest, torch.zeros_like(highest)).unsqueeze(4))
    # Sixteen sums over every sixteenth key, which are then added halving.
    totals = tree_sum(ordered_sum(weights.unflatten(4, (-1, _LANES)).permute(4, 0, 1, 2, 3, 5)))
    steps = min(SPLIT, blocks * KEY_BLOCK)
    values = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, 0, 0, splits * SPLIT // KEY_BLOCK - blocks))
    values = values.unflatten(1, (splits, -1)).permute(2, 4, 0, 3, 1, 5)
    values = values.reshape(SPLIT, tiles, kv_heads, 1, splits, of_value)[:steps]
    mixed = fused_sum(weights[..., :steps].permute(4, 0, 1, 2, 3).unsqueeze(5), values)
    if sinks is not None:
        sinks = sinks.view(1, kv_heads, 1, per_kv).expand(tiles, -1, rows, -1).reshape(tiles, kv_heads, -1)
    out = _join(mixed, highest, totals, seen, sinks).view(tiles, kv_heads, rows, per_kv, of_value)
    return out.transpose(1, 2).reshape(tiles, rows, heads, of_value)


def _join(mixed: Tensor, highest: Tensor, totals: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention (…, d) from its splits, first to last: online softmax (Milakov and Gimelshein, 1805.02867).

    mixed (…, splits, d): values under weights e^(score − the split's highest); highest and totals (…, splits): those
    scores, and the weights' sums; seen (…, splits): whether a row sees anything of the split.
    """
    value, total = torch.zeros_like(mixed[..., 0, :]), torch.zeros_like(totals[..., 0])
    most = torch.full_like(total, float("-inf"))
    for split in range(mixed.shape[-2]):
        part, top, added, here = mixed[..., split, :], highest[..., split], totals[..., split], seen[..., split]
        peak = torch.maximum(most, top)
        old, new = exp(most - peak), exp(top - peak)
        fresh = (total == 0) & (most == float("-inf"))
        joined = torch.where(fresh.unsqueeze(-1), part, value * old.unsqueeze(-1) + part * new.unsqueeze(-1))
        value = torch.where(here.unsqueeze(-1), joined, value)
        total = torch.where(here, torch.where(fresh, added, total * old + added * new), total)
        most = torch.where(here, peak, most)
    if sinks is not None:
        peak = torch.maximum(most, sinks)
        old = exp(most - peak)
        value, total = value * old.unsqueeze(-1), total * old + exp(sinks - peak)
    return value / total.unsqueeze(-1)
