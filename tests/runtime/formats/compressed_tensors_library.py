"""What compressed-tensors itself makes of a weight, for tests of both directions."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.formats.packed import PackedWeight

quantization = pytest.importorskip("compressed_tensors.quantization")


Tiny = Callable[..., Path]
# More than 8 rows: the library stumbles over its own zero points of 4 bits where they fit a single word.
SHAPES = [(24, 256), (13, 96), (33, 160), (9, 32)]
CONFIG = {"quant_method": "compressed-tensors"}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    """float32 rows whose ranges lie on both sides of 0, above it and below it: zero points at both ends."""
    centre = torch.tensor([0.0, 0.2, -0.2, 0.02])[torch.arange(n) % 4].unsqueeze(1)
    return torch.randn(n, k, generator=generator(seed)) * 0.05 + centre


def library_scheme(bits: int, group: int, symmetric: bool) -> Any:
    args = quantization.QuantizationArgs(
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="group" if group else "channel",
        group_size=group or None,
    )
    return quantization.QuantizationScheme(targets=["Linear"], weights=args)


def compressor(form: str) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(form)


def library_compresses(weight: Tensor, scheme: Any, dtype: torch.dtype, form: str) -> tuple[dict[str, Tensor], Tensor]:
    """The library's own ranges, codes and bytes for a weight, and the weights that it makes of them, float32."""
    from compressed_tensors.quantization.utils import calculate_qparams

    size = scheme.weights.group_size or weight.shape[1]
    grouped = weight.view(weight.shape[0], -1, size)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
    given_ = {"weight": weight, "weight_scale": scale.to(dtype).float()}
    if not scheme.weights.symmetric:
        given_["weight_zero_point"] = zero
    stored = compressor(form).compress(given_, scheme)
    dense = compressor(form).decompress(stored, scheme)["weight"]
    return stored | {"weight_scale": stored["weight_scale"].to(dtype)}, dense


def named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def reorder(packed: PackedWeight, perm: Tensor) -> PackedWeight:
    """The same codes, of which column j now belongs to input perm[j]."""
    return dataclasses.replace(packed, perm=perm)
