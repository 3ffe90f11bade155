"""Rotary frequencies of a GGUF file as transformers' `rope_parameters`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError
from runtime.gguf.keys import Keys
from runtime.gguf.names import ROPE_FACTORS
from runtime.gguf.types import F32

_BASE = 10_000.0
# Llama 3's scaling as all of its releases have it. A GGUF file has the factors that come of it, and not these.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192


def rope_parameters(keys: Keys, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` of config.json: default, linear, yarn or llama3.

    Raises UserError for scalings that are not run, and factors that are not Llama 3's.
    """
    base = keys.number("rope.freq_base", _BASE)
    rotated = keys.whole("rope.dimension_count", head_dim)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if rotated > head_dim or rotated % 2:
        raise UserError(f"{keys.shown}: rope.dimension_count must be even and at most {head_dim}, found {rotated}")
    if rotated != head_dim:
        parameters["partial_rotary_factor"] = rotated / head_dim
    kind = keys.header.metadata.get(f"{keys.architecture}.rope.scaling.type", "none")
    long = [name for name in keys.header.tensors if name.startswith(("rope_factors_long", "rope_factors_short"))]
    if long or kind not in ("none", "linear", "yarn"):
        found = "longrope" if long else kind
        raise UserError(
            f"{keys.shown}: rotary scaling {found!r} is not run from a GGUF file; linear, yarn and Llama 3's are, so"
            " give the original model directory"
        )
    if ROPE_FACTORS in keys.header.tensors:
        return parameters | _llama3(keys, base, rotated)
    if kind == "none":
        return parameters
    parameters |= {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = keys.whole("rope.scaling.original_context_length")
    return parameters


def llama3_factors(
    base: float, rotated: int, factor: float, low: float = LOW, high: float = HIGH, original: int = ORIGINAL
) -> NDArray[np.float32]:
    """(rotated / 2,) what Llama 3 divides the frequencies base^(−2i / rotated) by.

    1 for wavelengths below original / high, `factor` for those above original / low, and between them the inverse of a
    mean of 1 and 1 / factor, weighted by where original / wavelength stands between low and high.
    """
    wavelength = 2 * np.pi * base ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    share = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)


def _llama3(keys: Keys, base: float, rotated: int) -> dict[str, Any]:
    """The parameters whose factors the file has."""
    entry = keys.header.tensors[ROPE_FACTORS]
    if entry.kind != F32 or entry.shape != (rotated // 2,):
        raise UserError(
            f"{keys.shown}: tensor {ROPE_FACTORS} must hold {rotated // 2} F32 factors, found {entry.kind.name}"
            f" {list(entry.shape)}; the file is damaged, so fetch it again"
        )
    with keys.header.path.open("rb") as file:
        file.seek(entry.start)
        found = np.frombuffer(file.read(entry.size), "<f4")
    factor = float(found[-1])
    if not (1.0 <= factor < float("inf")) or not np.allclose(
        found, llama3_factors(base, rotated, factor), rtol=1e-4, atol=0.0
    ):
        raise UserError(
            f"{keys.shown}: the rotary factors of {ROPE_FACTORS} are not Llama 3's, and no others are run from a GGUF"
            " file; give the original model directory"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL,
    }
