"""safetensors files, written so that nothing is ever half there, and joined without loading them.

While a run works, every part (a block, or a tensor outside the blocks) is a file of its own; at the end the parts are
joined into shards by copying bytes. The layout follows the safetensors library: larger element types first, then by
name, so that every tensor is aligned.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.artifact import SHARD_BYTES
from compress.artifact.files import Digesting, Written, sync_folder, whole, write_json

INDEX = "model.safetensors.index.json"
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
WIDTHS = {name: dtype.itemsize for dtype, name in NAMES.items()}
_CHUNK = 1 << 22


@dataclass(frozen=True)
class _Entry:
    """One tensor: its place in the file `source` (or itself, where it is still in memory)."""

    name: str
    dtype: str
    shape: list[int]
    size: int
    source: Path | Tensor
    offset: int = 0


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Writes one safetensors file, synced and renamed into place."""
    entries = [
        _Entry(name, NAMES[tensor.dtype], list(tensor.shape), tensor.numel() * tensor.element_size(), tensor)
        for name, tensor in tensors.items()
    ]
    return _write(path, entries)


def join(parts: Sequence[Path], folder: Path, limit: int = SHARD_BYTES) -> list[str]:
    """Joins part files into `folder`/model.safetensors, or several shards of at most `limit` bytes and their index.

    A single tensor larger than `limit` gets a shard of its own. Returns the names of the files. The parts stay.
    """
    shards = _shards((entry for part in parts for entry in _entries(part)), limit)
    count = len(shards)
    names = (
        [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else ["model.safetensors"]
    )
    for name, entries in zip(names, shards, strict=True):
        _write(folder / name, entries)
    if count > 1:
        weight_map = {entry.name: name for name, entries in zip(names, shards, strict=True) for entry in entries}
        total = sum(entry.size for entries in shards for entry in entries)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        names.append(INDEX)
    sync_folder(folder)
    return names


Described = tuple[str, str, tuple[int, ...]]
"""A tensor of a file: its name, element type (a value of NAMES) and shape."""


def joined(parts: Iterable[Iterable[Described]], limit: int = SHARD_BYTES) -> list[list[Described]]:
    """What lies in each of the files that `join` would make of these parts, in its order."""
    return [[(one.name, one.dtype, tuple(one.shape)) for one in _ordered(shard)] for shard in _joined(parts, limit)]


def joined_bytes(parts: Iterable[Iterable[Described]], limit: int = SHARD_BYTES) -> int:
    """What the files that `join` would make of these parts take on disk together, headers included."""
    shards = _joined(parts, limit)
    return sum(8 + len(_header(_ordered(shard))) + sum(entry.size for entry in shard) for shard in shards)


def _joined(parts: Iterable[Iterable[Described]], limit: int) -> list[list[_Entry]]:
    nothing = torch.empty(0)
    entries = [
        _Entry(name, dtype, list(shape), math.prod(shape) * WIDTHS[dtype], nothing)
        for part in parts
        for name, dtype, shape in sorted(part, key=lambda one: (-WIDTHS[one[1]], one[0]))
    ]
    return _shards(entries, limit)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row after row."""
    flat: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return flat


def _shards(entries: Iterable[_Entry], limit: int) -> list[list[_Entry]]:
    """The entries in files of at most `limit` bytes of tensors each."""
    shards: list[list[_Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.size
    return shards


def _ordered(entries: Iterable[_Entry]) -> list[_Entry]:
    """As the safetensors library lays a file out."""
    return sorted(entries, key=lambda entry: (-WIDTHS[entry.dtype], entry.name))


def _header(ordered: Sequence[_Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in ordered:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [end, end + entry.size]}
        end += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _write(path: Path, entries: Sequence[_Entry]) -> Written:
    ordered = _ordered(entries)
    text = _header(ordered)
    with whole(path) as opened:
        file = Digesting(opened)
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in ordered:
            if isinstance(entry.source, Tensor):
                file.write(raw(entry.source))
            else:
                _copy(entry.source, entry.offset, entry.size, file)
    return file.written()


def _copy(source: Path, offset: int, size: int, into: Digesting) -> None:
    with source.open("rb") as file:
        file.seek(offset)
        while size:
            chunk = file.read(min(size, _CHUNK))
            if not chunk:
                raise OSError(f"{source} ends early")
            into.write(chunk)
            size -= len(chunk)


def _entries(path: Path) -> list[_Entry]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    return [
        _Entry(name, about["dtype"], about["shape"], end - begin, path, start + begin)
        for name, about in header.items()
        for begin, end in [about["data_offsets"]]
    ]
