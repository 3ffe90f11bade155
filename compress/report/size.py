"""The report's `size` section: bytes on disk, bits per quantised weight, bytes of cache per token, peak memory.

A model's bytes are the sizes of the safetensors files that it is loaded from: what `ls -l` shows, headers included (a
few kilobytes a file). Nothing is estimated from parameter counts.
"""

import json
import struct
import sys
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from compress.errors import UserError
from compress.report.facts import LayerRecord

_INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000  # what the safetensors library itself takes
_DTYPE_BITS = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8},
    **{"U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64},
    **{"C64": 64},
}
_CACHE_DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "float64": 8}


def measure(
    original: Path,
    model: Path,
    draft: Path | None,
    packed: Sequence[LayerRecord],
    *,
    kv_element_bytes: float | None = None,
) -> dict[str, Any]:
    """The `size` section of report.json: bytes, ratios, bits.

    original, model, draft   model directories; `packed` the quantised layers of `model`.
    kv_element_bytes         bytes per stored key or value, scales included, where the compressed cache is quantised;
                             None: both caches hold the dtype of their model's config.

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
    cache: dict[str, float | None] = {}
    for name, directory, element in (("original", original, None), ("compressed", model, kv_element_bytes)):
        figure = kv_bytes_per_token(_config(directory), element)
        cache[name] = None if isinstance(figure, str) else figure
        if isinstance(figure, str):
            missing[f"kv_bytes_per_token.{name}"] = figure
    peak = peak_memory_bytes()
    if peak is None:
        missing["peak_memory_bytes"] = "this system does not tell a process's peak memory"
    return {
        "original_bytes": original_bytes,
        "compressed_bytes": compressed_bytes,
        "ratio": original_bytes / compressed_bytes,
        "bits_per_weight": bits_per_weight(packed) if weights else None,
        "kv_bytes_per_token": cache,
        "draft_bytes": None if draft is None else weight_bytes(draft),
        "peak_memory_bytes": peak,
        "not_measured": missing,
    }


def bits_per_weight(layers: Sequence[LayerRecord]) -> float:
    """Stored bits (codes, scales, zero points, tables) over weights, of all `layers` together."""
    return 8 * sum(layer.stored_bytes for layer in layers) / sum(layer.weights for layer in layers)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that a model is loaded from: its index's shards, else all of its *.safetensors files.

    Raises UserError for a directory without any, a bad index, a shard that is missing or outside the directory.
    """
    index = directory / _INDEX
    if not index.is_file():
        single = directory / "model.safetensors"
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
        if not files:
            raise UserError(
                f"{directory} has no *.safetensors file: name the directory of a model saved as safetensors"
            )
        return files
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: expected a JSON object with a weight_map ({error}): save the model again") from error
    for shard in shards:
        if not isinstance(shard, str) or PurePosixPath(shard).name != shard or "\\" in shard:
            raise UserError(f"{index}: expected the names of files beside it, found {shard!r}: save the model again")
        if not (directory / shard).is_file():
            raise UserError(f"{index} names {shard}, which is not there: download or save the model again")
    return [directory / shard for shard in shards]


def weight_bytes(directory: Path) -> int:
    """Bytes on disk of a model's weights: the sizes of its `weight_files`."""
    return sum(file.stat().st_size for file in weight_files(directory))


def tensor_bytes(path: Path) -> dict[str, int]:
    """Bytes of each tensor of a safetensors file, read from its header alone.

    The format: 8 bytes with the header's length (little endian), a JSON header, the data without gaps
    (https://github.com/huggingface/safetensors). Raises UserError, naming file and tensor, where header and file
    do not agree.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(_HEADER_LIMIT, size - 8):
            raise UserError(f"{path} is no complete safetensors file ({size} bytes): download or save it again")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} has no readable safetensors header: download or save it again") from error
    sizes, end = {}, 0
    for name, entry in entries:
        try:
            begin, stop = entry["data_offsets"]
            expected = _DTYPE_BITS[entry["dtype"]] * prod(entry["shape"]) // 8
            sizes[name] = stop - begin
            end = max(end, stop)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}, tensor {name}: expected dtype, shape and data_offsets: save it again") from error
        if sizes[name] != expected:
            raise UserError(
                f"{path}, tensor {name}: expected {expected} bytes for {entry['dtype']} {entry['shape']}, found "
                f"{sizes[name]}: download or save it again"
            )
    if end != size - 8 - length or end != sum(sizes.values()):
        raise UserError(
            f"{path}: expected {end} bytes of tensors after the header, found {size - 8 - length}: "
            "download or save it again"
        )
    return sizes


def _config(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: name the directory of a model") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected a JSON object ({error}): save the model again") from error
    if not isinstance(config, Mapping):
        raise UserError(f"{path}: expected a JSON object, found {type(config).__name__}: save the model again")
    return config


def kv_bytes_per_token(config: Mapping[str, Any], element_bytes: float | None = None) -> float | str:
    """Bytes that one token adds to the cache: 2 · layers · key-value heads · head size · bytes per element.

    config         a model's config.json; its text part where it has one.
    element_bytes  bytes per element; None: those of the config's dtype.

    Returns the reason, a sentence's part, where the config does not tell (another kind of cache, say).
    """
    config = {**config, **(config.get("text_config") or {})}
    if config.get("kv_lora_rank"):
        return "the model caches a latent vector instead of keys and values"
    if "linear_attention" in (config.get("layer_types") or []):
        return "some of the model's layers keep a state of fixed size instead of keys and values"

    def first(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    layers = first("num_hidden_layers", "n_layer", "num_layers")
    heads = first("num_attention_heads", "n_head", "num_heads")
    kv_heads = first("num_key_value_heads", "num_kv_heads") or (1 if config.get("multi_query") else heads)
    hidden = first("hidden_size", "n_embd", "d_model")
    if not all(isinstance(value, int) and value > 0 for value in (layers, heads, kv_heads, hidden)):
        return "the config does not give layers, heads and hidden size as numbers"
    head_size = first("head_dim") or hidden // heads
    if element_bytes is None:
        dtype = str(first("dtype", "torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in _CACHE_DTYPE_BYTES:
            return f"the config's dtype {dtype} is none that a cache is kept in"
        element_bytes = _CACHE_DTYPE_BYTES[dtype]
    total = 2 * layers * kv_heads * head_size * element_bytes
    return int(total) if total == int(total) else float(total)


def peak_memory_bytes() -> int | None:
    """The most resident memory that this process has had, or None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes
