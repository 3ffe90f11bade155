"""The report's `size` section: bytes on disk, bits per quantised weight, bytes of cache per token, peak memory.

A model's bytes are the sizes of the safetensors files that it is loaded from: what `ls -l` shows, headers included (a
few kilobytes a file). Nothing is estimated from parameter counts.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from compress.records import LayerRecord, RunFacts
from compress.report.not_measured import NOT_LOADED, Reasons
from compress.report.schema import CacheBytes, Size, Sparsity
from runtime.checkpoints.open import open_checkpoint
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight


def measure(
    facts: RunFacts, cache_bytes: tuple[int, int] | None, device: torch.device | None = None
) -> tuple[Size, Reasons]:
    """The `size` section, and why figures are missing.

    cache_bytes  what one token takes in the cache of the original and of the compressed decoder; None: neither was
                 loaded.

    The draft does not count in the ratio; peak memory is that of this process until now (on CUDA: what torch held on
    the GPU at most). Raises UserError for a directory without readable safetensors weights.
    """
    missing: Reasons = {}
    original_bytes, compressed_bytes = weight_bytes(facts.original), weight_bytes(facts.model)
    if not facts.layers:
        missing["size.bits_per_weight"] = "no layer is quantised"
    if facts.draft is None:
        missing["size.draft_bytes"] = "the run has no draft model"
    if cache_bytes is None:
        missing["size.kv_bytes_per_token"] = NOT_LOADED
    zeros = None
    if facts.pruned:
        checkpoint = open_checkpoint(facts.model)
        zeros = sparsity(checkpoint.weight(name) for name in facts.pruned)
        if zeros.two_of_four_bytes is None:
            missing["size.sparsity.two_of_four_bytes"] = (
                "the zeros do not lie two in every four, so a 2:4 store cannot hold these layers"
            )
    peak = peak_memory_bytes(device)
    if peak is None:
        missing["size.peak_memory_bytes"] = "this system does not tell a process's peak memory"
    before, after = cache_bytes or (None, None)
    size = Size(
        original_bytes=original_bytes,
        compressed_bytes=compressed_bytes,
        ratio=original_bytes / compressed_bytes,
        bits_per_weight=bits_per_weight(facts.layers) if facts.layers else None,
        kv_bytes_per_token=CacheBytes(original=before, compressed=after),
        draft_bytes=None if facts.draft is None else weight_bytes(facts.draft),
        peak_memory_bytes=peak,
        sparsity=zeros,
    )
    return size, missing


def bits_per_weight(layers: Sequence[LayerRecord]) -> float:
    """Stored bits (codes, scales, zero points, input order, tables) over weights, of all `layers` together."""
    return 8 * sum(layer.stored_bytes for layer in layers) / sum(layer.weights for layer in layers)


def sparsity(weights: Iterable[PackedWeight | Tensor]) -> Sparsity:
    """The zeros of pruned layers (N, K), as they are on disk. `two_of_four_bytes` is None unless every four of a row
    have two zeros."""
    layers = total = zeros = value_bits = kept_bits = 0
    fits = True
    for weight in weights:
        values = dequantize(weight) if isinstance(weight, PackedWeight) else weight
        bits = weight.scheme.bits if isinstance(weight, PackedWeight) else 8 * weight.element_size()
        is_zero, count = values == 0, values.numel()
        layers, total, zeros = layers + 1, total + count, zeros + int(is_zero.sum())
        value_bits += bits * count
        # Of every four values two are kept, each with a 2-bit index (NVIDIA's Ampere layout).
        kept_bits += count // 4 * 2 * (bits + 2)
        fits = fits and values.shape[1] % 4 == 0 and bool((is_zero.view(-1, 4).sum(1) >= 2).all())
    return Sparsity(
        layers=layers,
        zero_share=zeros / total,
        value_bytes=value_bits // 8,
        two_of_four_bytes=kept_bits // 8 if fits else None,
    )


def weight_bytes(directory: Path) -> int:
    """Bytes on disk of a model's weights, all shards. Raises UserError where there are none that can be read."""
    return open_checkpoint(directory).bytes_on_disk()


def peak_memory_bytes(device: torch.device | None = None) -> int | None:
    """The most resident memory that this process has had, or None where the system does not tell.

    On a CUDA device: the most that torch has held there.
    """
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes
