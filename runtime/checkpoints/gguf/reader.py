"""The header of a GGUF file: metadata, and where each tensor lies. Nothing in it is believed before it is checked.

    "GGUF", u32 version, u64 tensors, u64 keys
    keys      string name, u32 type, value
    tensors   string name, u32 dimensions, u64 sizes (innermost first), u32 type, u64 offset from the data's start
    data      at the next multiple of general.alignment (32)

A string is a u64 length and UTF-8; an array a u32 type, a u64 count and its values; all little-endian. Versions 2 and 3
are the same on little-endian machines (github.com/ggml-org/ggml, docs/gguf.md).
"""

import math
import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError


@dataclass(frozen=True)
class BlockType:
    """A tensor type: `weights` numbers of a row share a block of `bytes` bytes."""

    name: str
    number: int
    weights: int
    bytes: int

    @property
    def plain(self) -> bool:
        """Whether the type is floats as they are."""
        return self.weights == 1

    def row_bytes(self, inputs: int) -> int:
        """Bytes of a row. Raises ValueError where blocks do not divide it."""
        if inputs % self.weights:
            raise ValueError(f"{self.name} has blocks of {self.weights}, which do not divide rows of {inputs}")
        return inputs // self.weights * self.bytes


F32 = BlockType("F32", 0, 1, 4)
F16 = BlockType("F16", 1, 1, 2)
BF16 = BlockType("BF16", 30, 1, 2)
Q4_0 = BlockType("Q4_0", 2, 32, 18)
Q4_1 = BlockType("Q4_1", 3, 32, 20)
Q5_0 = BlockType("Q5_0", 6, 32, 22)
Q5_1 = BlockType("Q5_1", 7, 32, 24)
Q8_0 = BlockType("Q8_0", 8, 32, 34)
Q2_K = BlockType("Q2_K", 10, 256, 84)
Q3_K = BlockType("Q3_K", 11, 256, 110)
Q4_K = BlockType("Q4_K", 12, 256, 144)
Q5_K = BlockType("Q5_K", 13, 256, 176)
Q6_K = BlockType("Q6_K", 14, 256, 210)
IQ4_NL = BlockType("IQ4_NL", 20, 32, 18)
IQ4_XS = BlockType("IQ4_XS", 23, 256, 136)
TQ1_0 = BlockType("TQ1_0", 34, 256, 54)
TQ2_0 = BlockType("TQ2_0", 35, 256, 66)
MXFP4 = BlockType("MXFP4", 39, 32, 17)

_PLAIN, _SMALL = (F32, F16, BF16), (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4)
_LARGE = (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, TQ1_0, TQ2_0)
TYPES: dict[int, BlockType] = {kind.number: kind for kind in (*_PLAIN, *_SMALL, *_LARGE)}
"""The types that are read, by number."""

UNREAD: dict[int, str] = (
    {9: "Q8_1", 15: "Q8_K", 29: "IQ1_M", 40: "NVFP4"}
    | {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"}
    | dict(enumerate(("I8", "I16", "I32", "I64", "F64"), start=24))
)
"""Names of types that are not read, so that a refusal can say what it met."""


# Before a string, in bytes.
_LENGTH = struct.Struct("<Q")
# What is read into memory at once: a tokenizer as JSON takes some tens of megabytes.
_MOST_BYTES = 1 << 28


class Cursor:
    """Reads little-endian values from `data` (bytes as uint8). `shown` is the file's name in errors."""

    def __init__(self, data: NDArray[np.uint8], shown: str):
        self.data, self.shown, self.at = data.data, shown, 0

    @property
    def left(self) -> int:
        """Bytes from here to the end."""
        return len(self.data) - self.at

    def damaged(self, what: str) -> UserError:
        """The error to raise for something impossible that was just read."""
        return UserError(f"{self.shown} is damaged: {what} (before byte {self.at}); fetch it again")

    def take(self, size: int) -> memoryview:
        """The next `size` bytes, not copied. Raises UserError where there are fewer."""
        if size > self.left:
            raise UserError(
                f"{self.shown} was cut short or is damaged: {size} bytes are said to follow byte {self.at}, but"
                f" {self.left} do; fetch it again"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        """An unsigned number of `size` bytes."""
        return int.from_bytes(self.take(size), "little")

    def count(self, least: int, what: str) -> int:
        """A u64 count of things of at least `least` bytes each. Raises UserError where so many cannot follow."""
        count = self.number(8)
        if count * least > self.left:
            raise self.damaged(f"{what}: {count} are said to follow, and the file has {self.left} bytes more")
        return count

    def string(self, what: str) -> str:
        """A string. Raises UserError where it is longer than the file, or no UTF-8."""
        raw = bytes(self.take(self._bounded(self.count(1, what), what)))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is no UTF-8") from error

    def strings(self, what: str, count: int) -> list[str]:
        """`count` strings, as `string` reads one: a vocabulary and its merges are several hundred thousand."""
        found: list[str] = []
        data, length, at, end = self.data, _LENGTH.unpack_from, self.at, len(self.data)
        while len(found) < count:
            first = at + _LENGTH.size
            if first <= end:
                last = first + length(data, at)[0]
                if last <= end and last - first <= _MOST_BYTES:
                    try:
                        found.append(str(data[first:last], "utf-8"))
                    except UnicodeDecodeError:
                        pass
                    else:
                        at = last
                        continue
            # Something is wrong with this one, and that says what.
            self.at = at
            found.append(self.string(what))
        self.at = at
        return found

    def array(self, dtype: str, count: int) -> NDArray[Any]:
        """`count` numbers, a copy: the file is not kept open for them."""
        size = self._bounded(count * np.dtype(dtype).itemsize, "an array")
        return np.frombuffer(self.take(size), dtype).copy()

    def _bounded(self, size: int, what: str) -> int:
        if size > _MOST_BYTES:
            raise self.damaged(f"{what} takes {size} bytes, and at most {_MOST_BYTES} are read")
        return size


MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
_SCALARS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
# Strings become Python objects. Vocabularies have some hundred thousand; a count of more is damage, not a model.
_MOST_STRINGS = 1 << 24

Value = int | float | bool | str | list[str] | NDArray[Any]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: `shape` outermost first, its first byte in the file and how many there are."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself. Arrays of numbers are numpy arrays, arrays of strings lists."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorEntry]


def read_header(path: Path) -> Header:
    """Reads and checks the header; of the tensors no byte is touched.

    Raises UserError naming the file and the place for anything that is no GGUF of version 2 or 3, counts, sizes or
    offsets beyond the file, tensors that overlap or are misaligned, and tensor types that are not read.
    """
    try:
        size = path.stat().st_size
        if size < len(MAGIC) + 4:
            raise UserError(f"{path.name} has {size} bytes, which is no GGUF file; fetch it again")
        cursor = Cursor(np.memmap(path, np.uint8, "r"), path.name)
    except OSError as error:
        raise UserError(f"{path.name} cannot be read: {error.strerror or error}") from error
    if (magic := bytes(cursor.take(4))) != MAGIC:
        raise UserError(f"{path.name} must begin with GGUF, found {magic!r}; give a GGUF file or a model directory")
    version = cursor.number(4)
    if version not in VERSIONS:
        raise UserError(
            f"{path.name}: GGUF of version 2 or 3 (little-endian) is read, found {version}; convert it again"
        )
    tensors, keys = cursor.count(24, "tensors"), cursor.count(13, "keys")
    metadata = _metadata(cursor, keys)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > size:
        raise UserError(f"{path.name}: general.alignment must be a power of two, found {alignment!r}")
    found = [_tensor(cursor) for _ in range(tensors)]
    data = -(-cursor.at // alignment) * alignment
    entries: dict[str, TensorEntry] = {}
    for entry in found:
        end = data + entry.start + entry.size
        if entry.name in entries:
            raise damaged(path.name, f"tensor {entry.name} is there twice")
        if entry.start % alignment:
            raise damaged(
                path.name, f"tensor {entry.name} lies at offset {entry.start}, expected a multiple of {alignment}"
            )
        if end > size:
            raise UserError(
                f"{path.name}: tensor {entry.name} ends at byte {end}, but the file has {size}; it was cut short, so"
                " fetch it again"
            )
        entries[entry.name] = replace(entry, start=data + entry.start)
    for before, entry in pairwise(sorted(entries.values(), key=lambda entry: entry.start)):
        if before.start + before.size > entry.start:
            raise damaged(path.name, f"tensors {before.name} and {entry.name} overlap")
    return Header(path, metadata, entries)


def damaged(shown: str, what: str) -> UserError:
    """The error to raise for contents of the file `shown` that cannot be."""
    return UserError(f"{shown}: {what}; the file is damaged, so fetch it again")


def _metadata(cursor: Cursor, keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(keys):
        name = cursor.string("the name of a key")
        if name in metadata:
            raise cursor.damaged(f"the key {name} is there twice")
        metadata[name] = _value(cursor, name)
    return metadata


def _value(cursor: Cursor, key: str) -> Value:
    kind = cursor.number(4)
    if kind == _STRING:
        return cursor.string(key)
    if kind == _ARRAY:
        return _array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.damaged(f"{key} has the unknown type {kind}")
    value: int | float | bool = cursor.array(_SCALARS[kind], 1)[0].item()
    return value


def _array(cursor: Cursor, key: str) -> Value:
    kind = cursor.number(4)
    if kind == _STRING:
        count = cursor.count(8, key)
        if count > _MOST_STRINGS:
            raise cursor.damaged(f"{key} has {count} strings, and at most {_MOST_STRINGS} are read")
        return cursor.strings(key, count)
    if kind not in _SCALARS:
        raise cursor.damaged(f"{key} is an array of the type {kind}, which is not read")
    return cursor.array(_SCALARS[kind], cursor.count(np.dtype(_SCALARS[kind]).itemsize, key))


def _tensor(cursor: Cursor) -> TensorEntry:
    """The entry, whose start is counted from the data's yet."""
    name = cursor.string("the name of a tensor")
    dimensions = cursor.number(4)
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise cursor.damaged(f"tensor {name} has {dimensions} dimensions, expected 1 to {_MOST_DIMENSIONS}")
    sizes = [int(n) for n in cursor.array("<u8", dimensions)]
    number = cursor.number(4)
    if number not in TYPES:
        known = ", ".join(kind.name for kind in TYPES.values())
        raise UserError(
            f"{cursor.shown}: tensor {name} has the type {UNREAD.get(number, number)}, and {known} are read; quantise"
            " the model to one of those"
        )
    kind = TYPES[number]
    if min(sizes) < 1 or sizes[0] % kind.weights:
        raise cursor.damaged(
            f"tensor {name} has the sizes {sizes}, expected positive ones and rows that are whole blocks of"
            f" {kind.weights}"
        )
    size = kind.row_bytes(sizes[0]) * math.prod(sizes[1:])
    return TensorEntry(name, kind, tuple(reversed(sizes)), cursor.number(8), size)
