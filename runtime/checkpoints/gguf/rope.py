"""The rotation of a GGUF file's metadata as `rope_parameters` of config.json."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.checkpoints.gguf.keys import Keys
from runtime.checkpoints.gguf.names import LONGROPE_FACTORS, ROPE_FACTORS
from runtime.checkpoints.gguf.reader import F32, damaged
from runtime.errors import UserError

_BASE = 10_000.0
# Llama 3's scaling as its releases have it, and Llama 4's: low_freq_factor, high_freq_factor and the original context.
# A GGUF file has the factors that come of it, and not these.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192
RELEASES = ((LOW, HIGH, ORIGINAL), (1.0, 1.0, ORIGINAL))
# A divisor of the frequencies of pairs that do not turn.
_STILL = 1e30
TRUNCATE = "rope.scaling.yarn_truncate"
ATTENTION_FACTOR, ORIGINAL_CONTEXT = "rope.scaling.attn_factor", "original_max_position_embeddings"


def rope_parameters(keys: Keys, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` of config.json: default, linear, yarn, llama3 or longrope.

    Raises UserError for scalings that are not run, and factors that are not Llama 3's.
    """
    base = keys.number("rope.freq_base", _BASE)
    rotated = keys.whole("rope.dimension_count", head_dim)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if rotated > head_dim or rotated % 2:
        raise UserError(f"{keys.shown}: rope.dimension_count must be even and at most {head_dim}, found {rotated}")
    if rotated != head_dim:
        parameters["partial_rotary_factor"] = rotated / head_dim
    factor = keys.get("rope.scaling.factor")
    kind = keys.get("rope.scaling.type", "none" if factor in (None, 0, 1) else "linear")
    if any(name in keys.header.tensors for name in LONGROPE_FACTORS.values()):
        return parameters | _longrope(keys, rotated)
    if kind not in ("none", "linear", "yarn"):
        raise UserError(
            f"{keys.shown}: rotary scaling {kind!r} is not run from such a GGUF file; linear, yarn and Llama 3's are,"
            " so give the original model directory"
        )
    if ROPE_FACTORS in keys.header.tensors:
        own = _proportional if keys.architecture == "gemma4" else _llama3
        return parameters | own(keys, base, rotated)
    if kind == "none":
        return parameters
    parameters |= {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    return parameters | _yarn(keys) if kind == "yarn" else parameters


# What llama.cpp's key is multiplied by before it is transformers' mscale_all_dim, where it knows one.
_LOG_MULTIPLIERS = {"deepseek2": 10.0, "mistral3": 1.0}


def _yarn(keys: Keys) -> dict[str, Any]:
    """What yarn has besides."""
    found: dict[str, Any] = {
        "original_max_position_embeddings": keys.whole(
            "rope.scaling.original_context_length", keys.whole("context_length")
        )
    }
    unit = _LOG_MULTIPLIERS.get(keys.architecture)
    if unit and (said := keys.real("rope.scaling.yarn_log_multiplier", 0.0)):
        # A float32, of which DeepSeek's is a tenth.
        all_dims = round(said * unit, 6)
        found |= {"mscale": all_dims if keys.architecture == "deepseek2" else 1.0, "mscale_all_dim": all_dims}
    if keys.architecture == "mistral3":
        found["beta_fast"] = keys.number("rope.scaling.yarn_beta_fast", 32.0)
        found["beta_slow"] = keys.number("rope.scaling.yarn_beta_slow", 1.0)
    # gpt-oss does not round the bounds of its ramp; llama.cpp rounds all. The key is ours.
    if not keys.truth(TRUNCATE, keys.architecture != "gpt-oss"):
        found["truncate"] = False
    return found


def llama3_factors(
    base: float, rotated: int, factor: float, low: float = LOW, high: float = HIGH, original: int = ORIGINAL
) -> NDArray[np.float32]:
    """(rotated / 2,) what Llama 3 divides the frequencies base^(−2i / rotated) by.

    1 for wavelengths below original / high, `factor` for those above original / low, and between them the inverse of a
    mean of 1 and 1 / factor, weighted by where original / wavelength stands between low and high.
    """
    wavelength = 2 * np.pi * base ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    # Where both are the same there is nothing between them.
    share = np.clip((original / wavelength - low) / max(high - low, 1e-12), 0.0, 1.0)
    return (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)


def _llama3(keys: Keys, base: float, rotated: int) -> dict[str, Any]:
    """The parameters whose factors the file has."""
    found = _factors(keys, rotated)
    factor = float(found[-1])
    known = RELEASES if 1.0 <= factor < float("inf") else ()
    release = next((one for one in known if _close(found, llama3_factors(base, rotated, factor, *one))), None)
    if release is None:
        raise UserError(
            f"{keys.shown}: the rotary factors of {ROPE_FACTORS} are not Llama 3's, and no others are run from a GGUF"
            " file; give the original model directory"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": release[0],
        "high_freq_factor": release[1],
        "original_max_position_embeddings": release[2],
    }


def proportional_factors(head_dim: int, turning: int, factor: float = 1.0) -> NDArray[np.float32]:
    """(head_dim / 2,) what Gemma 4's frequencies are divided by: the first `turning` by `factor`, the others, which do
    not turn, by a number beside which nothing turns."""
    return np.where(np.arange(head_dim // 2) < turning, factor, _STILL).astype(np.float32)


def _proportional(keys: Keys, base: float, rotated: int) -> dict[str, Any]:
    """The parameters whose factors the file has."""
    found = _factors(keys, rotated)
    turning, factor = int((found < _STILL).sum()), float(found[0])
    if not 0.0 < factor < _STILL or not _close(found, proportional_factors(rotated, turning, factor)):
        raise UserError(
            f"{keys.shown}: the rotary factors of {ROPE_FACTORS} are not Gemma 4's, and no others are run from such a"
            " file; give the original model directory"
        )
    # The half keeps its share of the dimensions from being rounded down to fewer pairs.
    return {"rope_type": "proportional", "partial_rotary_factor": (2 * turning + 0.5) / rotated, "factor": factor}


def _longrope(keys: Keys, rotated: int) -> dict[str, Any]:
    """LongRoPE's parameters, both sets of factors."""
    sets = {key: _factors(keys, rotated, name).tolist() for key, name in LONGROPE_FACTORS.items()}
    return sets | {
        "rope_type": "longrope",
        ORIGINAL_CONTEXT: keys.whole("rope.scaling.original_context_length"),
        "attention_factor": keys.number(ATTENTION_FACTOR, 1.0),
    }


def _factors(keys: Keys, rotated: int, name: str = ROPE_FACTORS) -> NDArray[np.float32]:
    """(rotated / 2,) the tensor's numbers. Raises UserError for another form."""
    entry = keys.header.tensors.get(name)
    if entry is None or entry.kind != F32 or entry.shape != (rotated // 2,):
        what = "none" if entry is None else f"{entry.kind.name} {list(entry.shape)}"
        raise damaged(keys.shown, f"tensor {name} must hold {rotated // 2} F32 factors, found {what}")
    return np.fromfile(keys.header.path, "<f4", rotated // 2, offset=entry.start)


def _close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    return bool(np.allclose(found, expected, 1e-4, 0.0))
