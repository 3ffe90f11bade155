"""A weight as the kernels read it: packed codes, scales by group, checked and laid out once, when it is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, is_

import torch
from torch import Tensor

from runtime.formats import dequantize, fp8
from runtime.formats.codes import with_whole_codes
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import KINDS
from runtime.formats.tensors import divided
from runtime.kernels.joined import HoldsTensors
from runtime.kernels.triton.weight_layout import PER_BYTE, Cut, cut

# Sums of products of int8 codes stay below 2^31 up to this many inputs (127 · 128 each).
MAX_INPUTS = 1 << 17
# Bits of one code in a byte, by how many share it.
_BITS = {1: 8, 2: 4, 4: 2}


@dataclass(frozen=True, eq=False)
class GpuWeight(HoldsTensors):
    """A linear layer's weight on a device.

    kind         "float", "fp8"; "int8", "int4" (−8..7), "uint4" (0..15), "nf4", "ternary"; "planes" (int8 in two
                 planes of nibbles) and "upper" (the upper one alone, as `reference.upper_codes`).
    shape        (N outputs, K inputs).
    codes        float: (N, K) as the file has it; fp8 likewise, as bytes (uint8). Else (N, cut.row_bytes) int8,
                 packed as weight_layout.py says.
    cut          how the inputs are cut; None for float and fp8.
    lower        planes: the lower nibbles, packed as `codes` are.
    levels       nf4: (16,) int8, for the interpreter.
    scale        (cut.columns, N) float32, of fp8 (1, N); of nf4 absmax / 127, its levels being in 127ths. 16 bits
                 would do for most, but loads of less than 32 are not asynchronous, and one that is waited for costs
                 more.
    offset       (cut.columns, N) float32 or None, as PackedWeight has it.
    perm         (K,) int32 or None: column j belongs to input perm[j].
    bias         (N,) float32 or None.
    input_scale  (1,) float32 or None: the static step of the inputs.
    """

    kind: str
    shape: tuple[int, int]
    codes: Tensor
    cut: Cut | None = None
    lower: Tensor | None = None
    levels: Tensor | None = None
    scale: Tensor | None = None
    offset: Tensor | None = None
    perm: Tensor | None = None
    bias: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def has_planes(self) -> bool:
        """Whether `upper_weight` takes it."""
        return self.kind == "planes"


def gpu_weight(weight: PackedWeight | Tensor, bias: Tensor | None, device: torch.device | str) -> GpuWeight:
    """Lays out a packed or float (N, K) weight on a device; `bias` (N,) is for float ones (packed ones carry theirs).

    Raises ValueError naming what does not fit: dtypes, shapes, codes out of range, sizes whose sums could overflow.
    """
    where = torch.device(device)
    if isinstance(weight, PackedWeight):
        kind = KINDS.get(weight.scheme.kind)
        if kind is not None and kind.is_float and not weight.planes:
            # E4M3 has a kernel; other floats are multiplied as what they stand for.
            if weight.scheme.kind != "fp8":
                return _float(dequantize(weight), weight.bias, where)
            return _fp8(weight, where)
        if weight.scheme.kind == "mxfp4":
            # Its levels times powers of two are bfloat16.
            return _float(dequantize(weight).bfloat16(), weight.bias, where)
        return _packed(weight, where)
    return _float(weight, bias, where)


def upper_weight(weight: GpuWeight) -> GpuWeight:
    """A weight in two planes, of which the products read the upper one alone: the same memory.

    Raises ValueError for other weights.
    """
    if not weight.has_planes:
        raise ValueError("only int8 weights packed as planes have an upper half of their own")
    return replace(weight, kind="upper", lower=None)


def concatenate(weights: Sequence[GpuWeight]) -> GpuWeight | None:
    """The rows of weights (after `share_inputs`) as one weight; None where they do not read their inputs alike."""
    first = weights[0]
    if len(weights) == 1:
        return first
    same, shared = attrgetter("kind", "cut", "codes.dtype"), attrgetter("perm", "input_scale")
    for other in weights[1:]:
        one_input = other.shape[1] == first.shape[1] and all(map(is_, shared(other), shared(first)))
        if same(other) != same(first) or not one_input or (other.offset is None) != (first.offset is None):
            return None
    bias = None
    if any(w.bias is not None for w in weights):
        bias = torch.cat([w.codes.new_zeros(w.shape[0]).float() if w.bias is None else w.bias for w in weights])
    return replace(
        first,
        shape=(sum(w.shape[0] for w in weights), first.shape[1]),
        codes=torch.cat([w.codes for w in weights]),
        lower=_joined([w.lower for w in weights], 0),
        scale=_joined([w.scale for w in weights], 1),
        offset=_joined([w.offset for w in weights], 1),
        bias=bias,
    )


def _joined(tensors: Sequence[Tensor | None], dim: int) -> Tensor | None:
    there = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(there, dim=dim) if there else None


def _float(weight: Tensor, bias: Tensor | None, device: torch.device) -> GpuWeight:
    known = (torch.float32, torch.bfloat16, torch.float16)
    if weight.ndim != 2 or weight.dtype not in known:
        raise ValueError(
            f"a float weight must be (N, K) float32, bfloat16 or float16, found {weight.dtype} {list(weight.shape)}"
        )
    n, k = weight.shape
    added = None if bias is None else _vector("bias", bias, (n,)).to(device)
    return GpuWeight("float", (n, k), weight.to(device).contiguous(), bias=added)


def _fp8(weight: PackedWeight, device: torch.device) -> GpuWeight:
    codes, (n, k) = weight.codes, weight.shape
    if codes.ndim != 2 or codes.dtype != fp8.DTYPE or weight.offset is not None or weight.perm is not None:
        raise ValueError(
            f"an fp8 weight must be (N, K) float8_e4m3fn in input order, without an offset, found {codes.dtype}"
            f" {list(codes.shape)}"
        )
    stored = codes.to(device).contiguous().view(torch.uint8)
    # The kernel takes exponents as they come, of which the highest with all bits set is NaN.
    if bool(((stored & 0x7F) == 0x7F).any()):
        raise ValueError("fp8 codes must be numbers, found NaN")
    scale = _vector("scale", weight.scale, (n, 1)).to(device).view(1, n)
    bias = None if weight.bias is None else _vector("bias", weight.bias, (n,)).to(device)
    return GpuWeight("fp8", (n, k), stored, scale=scale, bias=bias)


def _packed(weight: PackedWeight, device: torch.device) -> GpuWeight:
    kind, planes, (n, k) = weight.scheme.kind, weight.planes, weight.shape
    row = KINDS.get(kind)
    if row is None or (row.product or kind) not in PER_BYTE:
        raise ValueError(f"no Triton kernel for {kind} weights")
    if planes and not row.has_planes:
        raise ValueError(f"only int8 weights have planes, found {kind}")
    if n < 1 or not 1 <= k <= MAX_INPUTS:
        raise ValueError(
            f"a {kind} layer needs an output and 1 to {MAX_INPUTS} inputs, or a 32-bit sum could overflow;"
            f" found {n} and {k}"
        )
    codes = _codes(weight, device)
    found = _kind(kind, codes)
    per_byte = PER_BYTE["planes" if planes else found]
    shape = cut(k, weight.scheme.group_size, per_byte)
    levels = row.levels
    scale = _by_group("scale", divided(weight.scale, levels) if levels else weight.scale, n, shape, device)
    offset = None if weight.offset is None else _by_group("offset", weight.offset, n, shape, device)
    stored = _spread(codes, shape)
    return GpuWeight(
        "planes" if planes else found,
        (n, k),
        _pack_halves(stored, shape) if levels else _pack(stored >> 4 if planes else stored, shape),
        shape,
        lower=_pack(stored & 15, shape) if planes else None,
        levels=row.format.INT8_LEVELS.to(device) if levels else None,
        scale=scale,
        offset=offset,
        perm=None if (order := weight.order()) is None else order.to(device),
        bias=None if weight.bias is None else _vector("bias", weight.bias, (n,)).to(device),
        input_scale=None if (step := weight.static_step()) is None else step.to(device),
    )


def _codes(weight: PackedWeight, device: torch.device) -> Tensor:
    """(N, K) int8 on the device, one code a byte."""
    codes = with_whole_codes(replace(weight, codes=weight.codes.to(device))).codes
    if codes.ndim != 2 or codes.dtype != torch.int8:
        raise ValueError(f"codes must be (N, K) int8, found {codes.dtype} {list(codes.shape)}")
    return codes


def _kind(kind: str, codes: Tensor) -> str:
    low, high = (int(v) for v in torch.aminmax(codes))
    for number, (first, last) in enumerate(KINDS[kind].ranges):
        if first <= low and high <= last:
            # Nibbles may count from 0, too (int4 with zero points), and are other codes then.
            product = KINDS[kind].product or kind
            return f"u{product}" if number else product
    shown = " or ".join(f"{first}..{last}" for first, last in KINDS[kind].ranges)
    raise ValueError(f"{kind} codes must lie in {shown}, found {low}..{high}")


def _spread(codes: Tensor, shape: Cut) -> Tensor:
    """(N, K) to (N, stored): every group filled up by zeros, and groups that are not there."""
    pad = torch.nn.functional.pad
    groups = pad(codes, (0, shape.groups * shape.group - shape.inputs)).view(-1, shape.groups, shape.group)
    return pad(groups, (0, shape.padded - shape.group, 0, shape.columns - shape.groups)).flatten(1)


def _pack(stored: Tensor, shape: Cut) -> Tensor:
    """(N, stored) codes to (N, row_bytes) int8: `per_byte` neighbouring chunks share their bytes."""
    if shape.per_byte == 1:
        return stored.contiguous()
    bits = _BITS[shape.per_byte]
    chunks = stored.view(len(stored), -1, shape.per_byte, shape.chunk)
    packed = torch.zeros_like(chunks[:, :, 0], dtype=torch.uint8)
    for place in range(shape.per_byte):
        packed |= (chunks[:, :, place] & ((1 << bits) - 1)).to(torch.uint8) << bits * place
    return packed.view(torch.int8).flatten(1)


def _pack_halves(stored: Tensor, shape: Cut) -> Tensor:
    """(N, stored) codes 0..15 to (N, row_bytes) int8: of a word, each half holds four codes of one of two chunks."""
    pairs = stored.view(len(stored), -1, 2, shape.chunk // 4, 2, 2).to(torch.uint8)
    halves = pairs[..., 0] | (pairs[..., 1] << 4)
    return halves.transpose(2, 3).contiguous().view(torch.int8).flatten(1)


def _by_group(name: str, values: Tensor, n: int, shape: Cut, device: torch.device) -> Tensor:
    """(N, G) to (columns, N) float32."""
    moved = _vector(name, values, (n, shape.groups)).to(device)
    return torch.nn.functional.pad(moved, (0, shape.columns - shape.groups)).t().contiguous()


def _vector(name: str, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(values.shape) != shape or not values.is_floating_point():
        raise ValueError(f"{name} must be float {list(shape)}, found {values.dtype} {list(values.shape)}")
    return values.float().contiguous()
