"""A saved checkpoint as plain float32 weights, whoever wrote it: GPTQ files, compressed-tensors files, plain ones.

This reader belongs to no compressor: it knows the formats from their descriptions, and shares no code with ours.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_WORD = 32


@dataclass(frozen=True)
class StaticInput:
    """How a linear layer's input is rounded: codes of `bits`, one scale (and zero point) for the whole tensor."""

    scale: float
    zero: float
    bits: int

    def round(self, x: Tensor) -> Tensor:
        """x as the layer sees it, in x's dtype."""
        low = -(1 << (self.bits - 1))
        codes = torch.round(x / self.scale + self.zero).clamp(low, -low - 1)
        return (codes - self.zero) * self.scale


@dataclass(frozen=True)
class Dense:
    """Weights by their names in a plain checkpoint, float32; and of W8A8 the inputs' rounding by layer."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    inputs: dict[str, StaticInput]


def read(model: Path) -> Dense:
    """Reads a model directory. Raises ValueError for a format, or a rounding of activations, that is not known here."""
    from safetensors.torch import load_file

    config = json.loads((model / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file)
    quantization = config.pop("quantization_config", None)
    config.pop("compression_config", None)
    if quantization is None:
        return Dense(config, {name: tensor.float() for name, tensor in tensors.items()}, {})
    method = quantization.get("quant_method")
    if method == "gptq":
        return Dense(config, _gptq(tensors, quantization), {})
    if method == "compressed-tensors":
        return _compressed(config, tensors, quantization)
    raise ValueError(f"{model}: quant_method {method!r} is not read here")


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Codes (…, count) int64 from 0 up, out of int32 words (…, W): one stream of bits, each word's lowest first."""
    stream = words.to(torch.int64) & 0xFFFFFFFF
    first = torch.arange(count) * bits
    word, shift = first // _WORD, first % _WORD
    # A code may begin in one word and end in the next (of 3 bits, two of 32 do).
    following = torch.nn.functional.pad(stream, (0, 1))[..., word + 1]
    return ((stream[..., word] >> shift) | (following << (_WORD - shift))) & ((1 << bits) - 1)


def _gptq(tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> dict[str, Tensor]:
    """qweight (K·b/32, N) and qzeros (G, N·b/32) int32, scales (G, N), g_idx (K,): W = (q − zero) · scale."""
    layout = quantization.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise ValueError(f"GPTQ checkpoint_format {layout!r} is not read here")
    bits = quantization["bits"]
    weights = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if kind == "qweight":
            scales, g_idx = tensors[f"{prefix}.scales"].float(), tensors[f"{prefix}.g_idx"].long()
            codes = unpack(tensor.T, bits, len(g_idx))
            zeros = unpack(tensors[f"{prefix}.qzeros"], bits, scales.shape[1])
            if layout == "gptq":
                zeros = (zeros + 1) & ((1 << bits) - 1)  # stored less one, within its field
            weights[f"{prefix}.weight"] = (codes - zeros.T[:, g_idx]).float() * scales.T[:, g_idx]
        elif kind not in ("qzeros", "scales", "g_idx"):
            weights[name] = tensor.float()
    return weights


def _compressed(config: dict[str, Any], tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> Dense:
    """pack-quantized (weight_packed) and int-quantized (int8 weight), also mixed in one file."""
    groups = list(quantization["config_groups"].values())
    weights: dict[str, Tensor] = {}
    inputs: dict[str, StaticInput] = {}
    parts = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale", "input_zero_point")
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            n, k = tensors[f"{prefix}.weight_shape"].tolist()
            weights[f"{prefix}.weight"] = _packed(tensors, prefix, n, k)
        elif kind == "weight" and f"{prefix}.weight_scale" in tensors:
            if tensor.dtype != torch.int8:
                raise ValueError(f"{name}: {tensor.dtype} with a scale is not read here")
            zero = tensors.get(f"{prefix}.weight_zero_point", torch.zeros(()))
            weights[name] = _spread(tensor.float(), tensors[f"{prefix}.weight_scale"], zero, tensors, prefix)
        elif kind not in parts:
            weights[name] = tensor.float()
        if kind == "input_scale":
            zero = tensors.get(f"{prefix}.input_zero_point", torch.zeros(()))
            inputs[prefix] = StaticInput(float(tensor), float(zero), 8)
    rounded = [group["input_activations"] for group in groups if group.get("input_activations")]
    if any(about.get("dynamic") or about["num_bits"] != 8 for about in rounded) or bool(rounded) != bool(inputs):
        raise ValueError("of rounded activations int8 with a static scale per tensor is read here, nothing else")
    return Dense(config, weights, inputs)


def _packed(tensors: Mapping[str, Tensor], prefix: str, n: int, k: int) -> Tensor:
    """The bits of a code follow from the words of a row: K codes fill them to less than one word."""
    words, scale = tensors[f"{prefix}.weight_packed"], tensors[f"{prefix}.weight_scale"]
    if k < _WORD:
        raise ValueError(f"{prefix}: rows of {k} inputs do not tell the bits of a code")
    bits = words.shape[1] * _WORD // k
    half = 1 << (bits - 1)
    codes = (unpack(words, bits, k) - half).float()
    zero = torch.zeros(())
    if f"{prefix}.weight_zero_point" in tensors:  # packed along the rows
        packed = tensors[f"{prefix}.weight_zero_point"]
        zero = (unpack(packed.T, bits, n).T - half).float() if packed.dtype == torch.int32 else packed.float()
    return _spread(codes, scale, zero, tensors, prefix)


def _spread(codes: Tensor, scale: Tensor, zero: Tensor, tensors: Mapping[str, Tensor], prefix: str) -> Tensor:
    """(codes − zero) · scale; scale and zero (N, G), (N, 1) or () stand for K / G inputs each, or as g_idx says."""
    k = codes.shape[1]

    def wide(values: Tensor) -> Tensor:
        values = values.float()
        if values.ndim < 2:
            return values.reshape(-1, 1) if values.numel() > 1 else values.reshape(())
        if f"{prefix}.weight_g_idx" in tensors:
            return values[:, tensors[f"{prefix}.weight_g_idx"].long()]
        return values.repeat_interleave(k // values.shape[1], dim=1)

    return (codes - wide(zero)) * wide(scale)
