"""The report's `size` section: bytes on disk, bits per quantised weight, bytes of cache per token, peak memory.

A model's bytes are the sizes of the safetensors files that it is loaded from: what `ls -l` shows, headers included (a
few kilobytes a file). Nothing is estimated from parameter counts.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.report.facts import LayerRecord
from compress.report.unmeasured import NOT_LOADED
from runtime.checkpoint import open_checkpoint


def measure(
    original: Path,
    model: Path,
    draft: Path | None,
    packed: Sequence[LayerRecord],
    cache_bytes: tuple[int, int] | None,
) -> dict[str, Any]:
    """The `size` section of report.json: bytes, ratios, bits.

    original, model, draft   model directories; `packed` the quantised layers of `model`.
    cache_bytes              what one token takes in the cache of the original and of the compressed decoder; None:
                             neither was loaded.

    Keys: original_bytes, compressed_bytes and draft_bytes (`weight_bytes`); ratio = original / compressed, the draft
    not counted; bits_per_weight over the quantised weights only, their scales included; kv_bytes_per_token{original,
    compressed}; peak_memory_bytes of this process until now. A figure that could not be had is null, and `not_measured`
    says why. Raises UserError for a directory without readable safetensors weights.
    """
    missing: dict[str, str] = {}
    original_bytes, compressed_bytes = weight_bytes(original), weight_bytes(model)
    weights = sum(layer.weights for layer in packed)
    if not weights:
        missing["bits_per_weight"] = "no layer is quantised"
    if draft is None:
        missing["draft_bytes"] = "the run has no draft model"
    if cache_bytes is None:
        missing["kv_bytes_per_token"] = NOT_LOADED
    peak = peak_memory_bytes()
    if peak is None:
        missing["peak_memory_bytes"] = "this system does not tell a process's peak memory"
    return {
        "original_bytes": original_bytes,
        "compressed_bytes": compressed_bytes,
        "ratio": original_bytes / compressed_bytes,
        "bits_per_weight": bits_per_weight(packed) if weights else None,
        "kv_bytes_per_token": dict(zip(("original", "compressed"), cache_bytes or (None, None), strict=True)),
        "draft_bytes": None if draft is None else weight_bytes(draft),
        "peak_memory_bytes": peak,
        "not_measured": missing,
    }


def bits_per_weight(layers: Sequence[LayerRecord]) -> float:
    """Stored bits (codes, scales, zero points, tables) over weights, of all `layers` together."""
    return 8 * sum(layer.stored_bytes for layer in layers) / sum(layer.weights for layer in layers)


def weight_bytes(directory: Path) -> int:
    """Bytes on disk of a model's weights, all shards. Raises UserError where there are none that can be read."""
    return open_checkpoint(directory).bytes_on_disk()


def peak_memory_bytes() -> int | None:
    """The most resident memory that this process has had, or None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes
