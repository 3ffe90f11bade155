"""nf4: four bits into a table of normal quantiles, one absmax per block of 64; on disk as bitsandbytes writes it.

    weight                                  uint8 [N·K/2, 1]: two codes a byte, row by row, the first in the high half
    weight.absmax                           float32 [blocks], or uint8 with double quantisation
    weight.quant_map                        float32 [16]
    weight.nested_absmax, .nested_quant_map float32 [ceil(blocks / 256)], [256], with double quantisation
    weight.quant_state.bitsandbytes__nf4    uint8: JSON of block sizes, dtype, shape, offset

bitsandbytes cuts the flattened weight into blocks. Here a block never straddles two rows, so K must be a multiple
of the block; other layers are left alone by their callers.

Double quantisation (Dettmers et al. 2023) rounds the absmax themselves: to indices into a signed 8-bit map, with one
float32 absmax per 256 of them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.codes import unpack_nibbles
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.schemes import SCHEMES
from runtime.formats.tensors import Tensors, check_codes, check_finite, expect_dtype, fetch, read_bias, take, with_bias

NESTED_BLOCK = 256
# The library's CPU kernel looks the nearest entry up in a table of this many equal bins over −1..1.
_BINS = 65536
BLOCK = 64
LEVELS = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    dtype=torch.float32,
)
"""The sixteen levels, as fractions of a block's absmax."""

INT8_LEVELS = torch.round(127 * LEVELS).to(torch.int8)
"""The levels in 127ths, for integer products: w ≈ INT8_LEVELS[code] · absmax / 127.

Over normal weights the rounding has a root mean square of 0.0023 of a block's absmax (0.0037 at most); nf4's own is
about 0.04 of it. Reports state this.
"""

_MIDDLES = (LEVELS[:-1] + LEVELS[1:]) / 2
# Blocks below this are treated as if they had it: the library's guard against dividing by zero.
_SMALLEST = 1e-38
# Weights rounded at a time: bounds the temporaries of a large layer.
_CHUNK = 1 << 22
_STATE = "weight.quant_state.bitsandbytes__nf4"
_COMPUTE = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class NestedAbsmax:
    """Doubly quantised absmax of n blocks.

    codes   (n,) uint8: indices into `table`.
    absmax  (ceil(n / 256),) float32.
    table   (256,) float32, rising.
    offset  what was subtracted: a float32 value as a Python float.
    """

    codes: Tensor
    absmax: Tensor
    table: Tensor
    offset: float
    block: int = NESTED_BLOCK

    def undo(self) -> Tensor:
        """The n absmax as every reader sees them, float32: table[code] · absmax + offset."""
        scale = self.absmax.repeat_interleave(self.block)[: self.codes.numel()]
        return self.table[self.codes.long()] * scale + torch.tensor(self.offset, dtype=torch.float32)


@cache
def dynamic_map() -> Tensor:
    """The signed 8-bit dynamic map, (256,) float32 rising from −0.993 to 1.

    Exponents 10^−6 … 1; the i-th has 2^i fractions, the midpoints of equal parts of 0.1..1, with both signs; and 0, 1.
    """
    entries = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        # The product is in float32, as the library has it: another rounding would be another table.
        middles = (10 ** (exponent - 6)) * ((bounds[:-1] + bounds[1:]) / 2.0)
        entries += middles.tolist() + (-middles).tolist()
    return torch.tensor(sorted(entries), dtype=torch.float32)


@cache
def _nearest_by_bin() -> Tensor:
    table = dynamic_map()
    values = -1.0 + 2.0 * torch.arange(_BINS, dtype=torch.float32) / (_BINS - 1)
    return torch.bucketize(values, 0.5 * (table[:-1] + table[1:]), out_int32=True).to(torch.uint8)


def double_quantize(absmax: Tensor) -> NestedAbsmax:
    """Compresses (n,) float32 to the bytes that bitsandbytes 0.50 writes on x86 CPUs.

    Its CUDA kernel searches the exact nearest entry, so a file written there can differ by one index where a value lies
    near the middle of two. Blocks of zero differences get index 0, which is right: they are multiplied by 0.
    Raises ValueError where the mean of `absmax` is not finite.
    """
    offset = absmax.mean()
    if not bool(torch.isfinite(offset)):
        raise ValueError("the mean absmax is not finite: the weights are, or add up to more than float32 holds")
    rest = absmax - offset
    blocks = torch.nn.functional.pad(rest, (0, -rest.numel() % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    largest = blocks.abs().amax(dim=1)
    # 0 · inf of an empty (or subnormal) block is NaN, which the library's cast turns into bin 0.
    unit = (blocks * (1.0 / largest).unsqueeze(1)).nan_to_num(nan=-1.0).clamp(-1.0, 1.0)
    bins = ((unit + 1.0) * 0.5 * (_BINS - 1) + 0.5).to(torch.int32)
    codes = _nearest_by_bin()[bins.long()].flatten()[: rest.numel()].contiguous()
    return NestedAbsmax(codes, largest, dynamic_map().clone(), float(offset))


@dataclass(frozen=True)
class Nf4Weight(PackedWeight):
    """A PackedWeight that also keeps how its absmax is stored; `nested` None: as float32."""

    nested: NestedAbsmax | None = None

    def plain(self) -> PackedWeight:
        """Without the stored form: all that a kernel needs."""
        return PackedWeight(**{field.name: getattr(self, field.name) for field in fields(PackedWeight)})


def scheme(block: int = BLOCK) -> Scheme:
    """nf4 with an absmax per `block` inputs; activations per token and block."""
    return SCHEMES["nf4"].scheme(block)


def pack(
    weight: Tensor, group_size: int = BLOCK, *, bias: Tensor | None = None, double_quant: bool = True
) -> Nf4Weight:
    """Rounds (N, K) of any float dtype to the codes that bitsandbytes' `quantize_4bit` gives.

    `scale` is the absmax after double quantisation was undone, or the absmax itself where `double_quant` is off. The
    codes are chosen against the exact absmax in both cases, as the library does. Raises ValueError where blocks do not
    divide K: such a layer is left alone.
    """
    n, k = weight.shape
    if group_size < 1 or k % group_size:
        raise ValueError(
            f"nf4 blocks of {group_size} would straddle rows of {k} inputs; leave a layer alone whose inputs are no"
            f" multiple of {group_size}"
        )
    codes = torch.empty(n, k, dtype=torch.int8, device=weight.device)
    absmax = torch.empty(n, k // group_size, dtype=torch.float32, device=weight.device)
    middles = _MIDDLES.to(weight.device)
    step = max(1, _CHUNK // k)
    for first in range(0, n, step):
        rows = slice(first, first + step)
        blocks = weight[rows].float().contiguous().view(-1, k // group_size, group_size)
        absmax[rows] = blocks.abs().amax(dim=-1)
        unit = (blocks * (1.0 / absmax[rows].clamp(min=_SMALLEST)).unsqueeze(-1)).clamp(-1, 1)
        codes[rows] = torch.bucketize(unit, middles, out_int32=True).to(torch.int8).view(-1, k)
    nested = double_quantize(absmax.flatten()) if double_quant else None
    scale = absmax if nested is None else nested.undo().view(n, -1)
    return Nf4Weight(scheme(group_size), codes, scale, bias=None if bias is None else bias.float(), nested=nested)


def to_tensors(packed: PackedWeight, prefix: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The layer's tensors for a file; `dtype` is the original weight's, which readers dequantise to.

    A plain PackedWeight is written with float32 absmax; an Nf4Weight as it says. Raises ValueError for other schemes,
    an offset, a permutation, a bias that `dtype` would round, or a scale that is not that of `nested`.
    """
    if packed.scheme.kind != "nf4" or packed.offset is not None or packed.perm is not None:
        raise ValueError(f"{prefix}: bitsandbytes' layout holds nf4 in input order, found {packed.scheme}")
    nested = packed.nested if isinstance(packed, Nf4Weight) else None
    codes = check_codes(prefix, packed.codes, 0, 15).flatten().to(torch.uint8)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": packed.scheme.group_size,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(packed.shape),
    }
    tensors = {
        f"{prefix}.weight": (codes[0::2] << 4 | codes[1::2]).unsqueeze(1).contiguous(),
        f"{prefix}.weight.absmax": packed.scale.flatten().contiguous() if nested is None else nested.codes,
        f"{prefix}.weight.quant_map": LEVELS.clone(),
    }
    if nested is not None:
        if not torch.equal(nested.undo(), packed.scale.flatten()):
            raise ValueError(f"{prefix}: scale and nested absmax differ; double_quantize the new scale first")
        tensors[f"{prefix}.weight.nested_absmax"] = nested.absmax
        tensors[f"{prefix}.weight.nested_quant_map"] = nested.table.clone()
        state |= {"nested_blocksize": nested.block, "nested_dtype": "float32", "nested_offset": nested.offset}
    tensors[f"{prefix}.{_STATE}"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return with_bias(tensors, packed, prefix, dtype)


def holds(tensors: Tensors, prefix: str) -> bool:
    """Whether the layer is stored as bitsandbytes nf4."""
    return f"{prefix}.{_STATE}" in tensors


def from_tensors(tensors: Tensors, prefix: str, unpack: bool = True) -> Nf4Weight:
    """Reads a layer that bitsandbytes (or `to_tensors`) wrote, with and without double quantisation.

    `unpack` False leaves the codes two a byte.

    Raises UserError naming the tensor for a missing, misshapen or non-finite one, another table, or blocks that
    straddle rows.
    """
    state = _read_state(tensors, f"{prefix}.{_STATE}")
    (n, k), block = state["shape"], state["blocksize"]
    data = fetch(tensors, f"{prefix}.weight", torch.uint8, shape=(n * k // 2, 1)).flatten()
    codes = unpack_nibbles(data, high_first=True).view(n, k) if unpack else data.view(n, k // 2)
    name = f"{prefix}.weight.quant_map"
    if not torch.allclose(fetch(tensors, name, shape=(16,)).float(), LEVELS, atol=1e-6):
        raise UserError(f"tensor {name} is not the nf4 table; only nf4 is read")
    name = f"{prefix}.weight.absmax"
    absmax, nested = fetch(tensors, name, shape=(n * k // block,)), None
    if "nested_offset" in state:
        expect_dtype(name, absmax, torch.uint8)
        inner, size = state["nested_blocksize"], -(-absmax.numel() // state["nested_blocksize"])
        largest = fetch(tensors, f"{prefix}.weight.nested_absmax", torch.float32, shape=(size,))
        table = fetch(tensors, f"{prefix}.weight.nested_quant_map", torch.float32, shape=(256,))
        nested = NestedAbsmax(absmax, largest, table, state["nested_offset"], inner)
        absmax = nested.undo()
    return Nf4Weight(
        scheme(block),
        codes,
        check_finite(name, expect_dtype(name, absmax, torch.float32)).view(n, -1),
        bias=read_bias(tensors, prefix, n),
        nibbles=None if unpack else "high",
        nested=nested,
    )


def _read_state(tensors: Tensors, name: str) -> dict[str, Any]:
    """The JSON beside a weight, with every value checked that is used."""
    try:
        state = json.loads(bytes(expect_dtype(name, take(tensors, name), torch.uint8).flatten().tolist()))
    except (ValueError, RecursionError) as error:
        raise UserError(f"tensor {name} must hold JSON in UTF-8: {error}") from error
    if not isinstance(state, dict) or state.get("quant_type") != "nf4":
        raise UserError(f"tensor {name} must describe an nf4 weight, found {str(state)[:80]}")
    shape, block = state.get("shape"), state.get("blocksize")
    sizes = [*shape, block] if isinstance(shape, list) and len(shape) == 2 else []
    if len(sizes) != 3 or not all(type(size) is int and size > 0 for size in sizes):
        raise UserError(f"tensor {name} must give a shape of two sizes and a blocksize, found {shape} and {block}")
    if sizes[1] % sizes[2] or sizes[1] % 2:
        raise UserError(f"tensor {name}: blocks of {block} straddle rows of {sizes[1]} inputs, which is not read")
    if "nested_offset" in state:
        offset, inner = state["nested_offset"], state.get("nested_blocksize")
        if type(offset) is not float or type(inner) is not int or inner < 1 or abs(offset) > 3.4e38:
            raise UserError(f"tensor {name} must give nested_offset and nested_blocksize, found {offset} and {inner}")
    return state


def hf_config(skip: Sequence[str] = (), *, double_quant: bool = True, compute: str = "bfloat16") -> dict[str, Any]:
    """`quantization_config` of config.json for bitsandbytes; `skip` are the modules that stay as they are.

    `compute` is the dtype of the loader's products: float32, bfloat16 or float16.
    """
    if compute not in _COMPUTE:
        raise ValueError(f"compute must be one of {', '.join(_COMPUTE)}, found {compute!r}")
    more = {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double_quant,
        "bnb_4bit_compute_dtype": compute,
        "bnb_4bit_quant_storage": "uint8",
    }
    return library_config(4, more, skip)


def library_config(bits: int, more: dict[str, Any], skip: Sequence[str]) -> dict[str, Any]:
    """What bitsandbytes' `quantization_config` says in 4 or 8 bits; `more` between its keys."""
    kinds = {"load_in_4bit": bits == 4, "load_in_8bit": bits == 8}
    return {
        "quant_method": "bitsandbytes",
        **{f"_{key}": value for key, value in kinds.items()},
        **kinds,
        **more,
        "llm_int8_skip_modules": list(skip),
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_threshold": 6.0,
    }
