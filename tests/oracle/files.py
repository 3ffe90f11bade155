"""safetensors files and the layouts in them, by numpy alone: every weight as the file's description has it.

What is rounded while a weight is read is said beside it (`Weight.loose`), in units of the result.
"""

import json
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# float32's unit roundoff.
U = 2.0**-24
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I8": "i1", "U8": "u1"}
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(frozen=True)
class Weight:
    """A linear layer, float64: rows of `codes` (N, K) times `scale`, minus `offset`, both (N, G); or `codes` are the
    weights themselves where `scale` is None.

    order   (K,) the input that each column belongs to; None: their own.
    step    the static step of the inputs; None: measured per token and group.
    loose   relative error with which scales (N, G), or weights, come out of the file in float32.
    """

    codes: Array
    scale: Array | None = None
    offset: Array | None = None
    bias: Array | None = None
    order: Array | None = None
    step: float | None = None
    loose: Array | float = 0.0


def read_tensors(file: Path) -> dict[str, Array]:
    """Every tensor of a safetensors file; floats as float64, others as they are."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    found = {}
    for name, about in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        first, last = (8 + size + at for at in about["data_offsets"])
        data, kind = raw[first:last], about["dtype"]
        if kind == "F8_E4M3":
            values = _e4m3(np.frombuffer(data, np.uint8))
        else:
            values = np.frombuffer(data, _TYPES[kind])
            if kind == "BF16":
                values = (values.astype("<u4") << 16).view("<f4")
            values = values.astype(np.float64) if kind[0] in "FB" else values
        found[name] = values.reshape(about["shape"])
    return found


def _e4m3(octets: Array) -> Array:
    """OCP's E4M3: 1 bit of sign, 4 of exponent (bias 7), 3 of mantissa; no number of the tests is a NaN."""
    exponent, mantissa = (octets >> 3 & 15).astype(int), (octets & 7).astype(np.float64)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(octets >> 7 == 1, -size, size)


def bits_of(words: Array, bits: int, count: int) -> Array:
    """(rows, count) numbers of so many bits each, out of (rows, …) words, the first in the lowest bits."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    stream = np.unpackbits(octets, axis=1, bitorder="little")[:, : count * bits]
    return stream.reshape(len(words), count, bits).astype(np.int64) @ (1 << np.arange(bits))


def read_weight(tensors: dict[str, Array], quantization: dict[str, Any] | None, prefix: str) -> Weight:
    """The layer of that name, by what its tensors are called."""
    has = {name.removeprefix(f"{prefix}."): t for name, t in tensors.items() if name.startswith(f"{prefix}.")}
    bias = has.get("bias")
    if "weight_packed" in has:
        return _words(has, quantization or {}, bias)
    if "qweight" in has:
        return (_awq if (quantization or {})["quant_method"] == "awq" else _gptq)(has, quantization or {}, bias)
    if "weight.quant_map" in has:
        return _nf4(has, bias)
    if "SCB" in has:
        scale = has["SCB"][:, None] / 127
        return Weight(has["weight"].astype(float), scale, bias=bias, loose=U)
    if "weight_scale" in has and has["weight"].dtype == np.uint8:
        return _ternary(has, quantization or {}, bias)
    if "weight_scale" in has and has["weight"].dtype == np.int8:
        return _rows(has, bias)
    if "weight_scale" in has:
        return Weight(has["weight"] * has["weight_scale"].reshape(-1, 1), bias=bias, loose=U)
    return Weight(has["weight"], bias=bias)


def _rows(has: dict[str, Array], bias: Array | None) -> Weight:
    codes = has["weight"].astype(float)
    n = len(codes)
    scale, zero = has["weight_scale"], has.get("weight_zero_point")
    wide = scale if scale.size not in (1, n) else np.broadcast_to(scale.reshape(-1, 1), (n, 1))
    offset = None if zero is None else wide * np.broadcast_to(zero.reshape(-1, wide.shape[1]), wide.shape)
    step = float(has["input_scale"][0]) if "input_scale" in has else None
    return Weight(codes, wide, offset, bias, step=step)


def _ordered(index: Array | None) -> Array | None:
    return None if index is None else np.argsort(index, kind="stable")


def _words(has: dict[str, Array], quantization: dict[str, Any], bias: Array | None) -> Weight:
    n, k = (int(size) for size in has["weight_shape"])
    # Of several widths that fill as many words the configuration's tells: the tests name one width for each layer.
    words, scale = has["weight_packed"], has["weight_scale"]
    bits = int(has["bits"])
    half = 1 << bits - 1
    codes, zero, offset = bits_of(words, bits, k) - half, has.get("weight_zero_point"), None
    if zero is not None:
        offset = scale * (bits_of(zero.T, bits, n).T - half)
    order = _ordered(has.get("weight_g_idx"))
    codes = (codes if order is None else codes[:, order]).astype(float)
    return Weight(codes, scale, offset, bias, order)


def _gptq(has: dict[str, Array], quantization: dict[str, Any], bias: Array | None) -> Weight:
    bits, index = quantization["bits"], has["g_idx"]
    n, k, half = has["qweight"].shape[1], len(index), 1 << bits - 1
    size = k if quantization["group_size"] == -1 else quantization["group_size"]
    codes = bits_of(has["qweight"].T, bits, k) - half
    zero = bits_of(has["qzeros"], bits, n).T + (quantization["checkpoint_format"] == "gptq")
    scale, offset = has["scales"].T, (zero & (2 * half - 1)) - half
    offset = scale * offset
    if k % size:
        # A short last group: inputs are rounded in equal parts, the largest that cut both.
        part = gcd(k, size)
        scale, offset = (values[:, np.arange(0, k, part) // size] for values in (scale, offset))
    order = _ordered(index)
    assert order is not None
    return Weight(codes[:, order].astype(float), scale, offset, bias, order)


def _awq(has: dict[str, Array], quantization: dict[str, Any], bias: Array | None) -> Weight:
    n = has["scales"].shape[1]

    def unpacked(words: Array) -> Array:
        nibbles = bits_of(words, 4, n).reshape(len(words), -1, 8)
        columns = np.empty_like(nibbles)
        columns[:, :, [0, 2, 4, 6, 1, 3, 5, 7]] = nibbles
        return columns.reshape(len(words), n).T

    scale = has["scales"].T
    codes, zero = unpacked(has["qweight"]) - 8, unpacked(has["qzeros"]) - 8
    return Weight(codes.astype(float), scale, scale * zero, bias)


def _nf4(has: dict[str, Array], bias: Array | None) -> Weight:
    state = json.loads(bytes(has["weight.quant_state.bitsandbytes__nf4"]))
    (n, k), absmax, loose = state["shape"], has["weight.absmax"], U
    if "nested_offset" in state:
        scale = np.repeat(has["weight.nested_absmax"], state["nested_blocksize"])[: absmax.size]
        part = has["weight.nested_quant_map"][absmax] * scale
        absmax = part + state["nested_offset"]
        loose = (U * (np.abs(part) + np.abs(absmax)) / np.abs(absmax) + U).reshape(n, -1)
    octets = has["weight"].ravel()
    places = np.stack((octets >> 4, octets & 15), axis=1).reshape(n, k)
    # The kernels multiply integers: they hold the sixteen levels in 127ths, which docs and reports say.
    codes = np.rint(127 * np.array(_NF4))[places]
    return Weight(codes, absmax.reshape(n, -1) / 127, bias=bias, loose=loose)


def _ternary(has: dict[str, Array], quantization: dict[str, Any], bias: Array | None) -> Weight:
    codes = np.concatenate([(has["weight"] >> 2 * i & 3).astype(float) - 1 for i in range(4)])
    value, multiply = float(has["weight_scale"][0]), quantization["linear_class"] == "autobitlinear"
    scale = np.full((len(codes), 1), value if multiply else 1 / value)
    return Weight(codes, scale, bias=bias if bias is None or not multiply else bias * value, loose=U)
