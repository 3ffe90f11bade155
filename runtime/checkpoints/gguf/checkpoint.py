"""A GGUF file as a checkpoint: tensors under transformers' names, blocks as the formats that our kernels run."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.checkpoints.architecture import describe
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.gguf.blocks import Groups, unpack
from runtime.checkpoints.gguf.config import configure
from runtime.checkpoints.gguf.names import FORMS, HEAD, LONGROPE_FACTORS, ROPE_FACTORS
from runtime.checkpoints.gguf.part import Order, Part
from runtime.checkpoints.gguf.parts import alternatives, numbers, parts
from runtime.checkpoints.gguf.reader import BF16, F16, BlockType, Header, TensorEntry, damaged, read_header
from runtime.checkpoints.safetensors import Entry, Shards
from runtime.errors import UserError
from runtime.formats import dequantize, ternary
from runtime.formats.packed import Kind, PackedWeight, Scheme
from runtime.formats.tensors import check_finite

_KINDS: dict[str, tuple[Kind, int]] = (
    dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), ("int4", 4))
    | dict.fromkeys(("Q2_K", "Q3_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS"), ("int8", 8))
    | dict.fromkeys(("TQ1_0", "TQ2_0"), ("ternary", 2))
    | {"MXFP4": ("mxfp4", 4)}
)


@dataclass(frozen=True)
class Place:
    """A tensor of transformers': element `index` of a part's tensor, or all of it (None)."""

    part: Part
    index: int | None = None


class GgufTensors(Shards):
    """Tensors by transformers' names; quantised ones are float32 when they are asked for as tensors.

    As with safetensors every read maps the file anew and lets it go.
    """

    def __init__(self, header: Header, config: Mapping[str, Any]):
        """Raises UserError for tensors that the architecture does not have."""
        self.header, self.directory, self.files = header, header.path.parent, (header.path,)
        self._places = _places(header, config)
        self._numbers = dict(_numbers(header, config))
        entries = {name: self._entry(places) for name, places in self._places.items()}
        entries |= {name: Entry(header.path, "F32", tuple(one.shape)) for name, one in self._numbers.items()}
        self._entries = dict(sorted(entries.items()))

    def _entry(self, places: list[Place]) -> Entry:
        """File, dtype ("F32" for quantised tensors, and those of several) and shape."""
        first = places[0]
        stored = self.header.tensors[first.part.tensor]
        shape = stored.shape if first.index is None else stored.shape[1:]
        if first.part.half is not None:
            shape = (shape[0] // 2, shape[1])
        if len(places) > 1:
            whole = sum(len(place.part.rows) for place in places if place.part.rows is not None)
            return Entry(self.header.path, "F32", (whole, _matrix(stored, first.part)[-1]))
        if first.part.turned == "matrix":
            shape = shape[::-1]
        if first.part.shape is not None:
            shape = tuple(math.prod(shape) if size < 0 else size for size in first.part.shape)
        return Entry(self.header.path, stored.kind.name if stored.kind.plain else "F32", shape)

    def entry(self, name: str) -> Entry:
        if name not in self:
            raise UserError(f"{self.header.path.name}: tensor {name} is missing; the file is incomplete")
        return self._entries[name]

    def kinds(self, name: str) -> list[BlockType]:
        """The types of the file's tensors that hold a tensor: one, mostly. Raises UserError where it is missing."""
        self.entry(name)
        return [self.header.tensors[place.part.tensor].kind for place in self._places[name]]

    def __getitem__(self, name: str) -> Tensor:
        found = self.weight(name)
        if not isinstance(found, PackedWeight):
            return found
        plain = dequantize(found)
        return plain.t().contiguous() if self._places[name][0].part.turned == "matrix" else plain

    def weight(self, name: str) -> PackedWeight | Tensor:
        """A tensor as it is stored, its rows in transformers' order: packed (N, K), or plain.

        Raises UserError naming the tensor for one that is missing, cannot be read, or has scales that are not finite.
        """
        shape = self.entry(name).shape
        if name in self._numbers:
            return self._numbers[name]
        places = self._places[name]
        if len(places) == 1:
            return self._one(places[0], shape)
        kinds = {self.header.tensors[place.part.tensor].kind for place in places}
        if len(kinds) == 1 and not any(place.part.turned for place in places):
            return self._together(places, shape)
        whole = torch.zeros(shape)
        for place in places:
            assert place.part.rows is not None
            whole[torch.from_numpy(place.part.rows)] = self._rows_of(place)
        return whole

    def _one(self, place: Place, shape: tuple[int, ...]) -> PackedWeight | Tensor:
        part = place.part
        stored = self.header.tensors[part.tensor]
        rows = self._bytes(stored, place)
        if part.rows is not None:
            if len(rows) != len(part.rows):
                what = f"tensor {stored.name} has {len(rows)} rows, expected {len(part.rows)}"
                raise damaged(self.header.path.name, what)
            rows = rows[np.argsort(part.rows)]
        if not stored.kind.plain:
            found = to_packed(self.header.path.name, stored, unpack(stored.kind, rows))
            return found if part.columns is None else take_columns(found, np.argsort(part.columns))
        values = _plain(stored, rows)
        if part.columns is not None:
            return take_columns(values, np.argsort(part.columns))
        if part.turned == "matrix":
            return values.t().contiguous()
        values = values.reshape(shape)
        if part.logarithm:
            return (-values.float()).log()
        return values.float() - part.offset if part.offset else values

    def _together(self, places: list[Place], shape: tuple[int, ...]) -> PackedWeight | Tensor:
        """The rows of several tensors of one type."""
        stored = self.header.tensors[places[0].part.tensor]
        rows = np.concatenate([self._bytes(self.header.tensors[place.part.tensor], place) for place in places])
        order = np.concatenate([place.part.rows for place in places if place.part.rows is not None])
        if len(rows) != len(order):
            what = f"tensor {stored.name} and those beside it have {len(rows)} rows, expected {len(order)}"
            raise damaged(self.header.path.name, what)
        rows = rows[np.argsort(order)]
        if stored.kind.plain:
            return _plain(stored, rows).reshape(shape)
        return to_packed(self.header.path.name, stored, unpack(stored.kind, rows))

    def _rows_of(self, place: Place) -> Tensor:
        """The rows of one tensor of several, float32."""
        stored = self.header.tensors[place.part.tensor]
        raw = self._bytes(stored, place)
        if stored.kind.plain:
            found = _plain(stored, raw).float()
        else:
            found = dequantize(to_packed(self.header.path.name, stored, unpack(stored.kind, raw)))
        if place.part.turned == "heads":
            found = found.reshape(stored.shape).transpose(1, 2)
        return found.reshape(_matrix(stored, place.part))

    def _bytes(self, stored: TensorEntry, place: Place) -> NDArray[np.uint8]:
        """(rows, bytes of a row), where a vector has a row for each value, and a value turned or shaped as it lies."""
        shape = stored.shape if place.index is None else stored.shape[1:]
        count = math.prod(shape[:-1])
        size = count * stored.kind.row_bytes(shape[-1])
        start = stored.start + size * (place.index or 0)
        try:
            mapped = np.memmap(self.header.path, np.uint8, "r", offset=start, shape=(size,))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.header.path.name}: tensor {stored.name} cannot be read: {error}") from error
        rows = np.array(mapped).reshape(shape[0] if len(shape) == 1 else count, -1)
        return rows if place.part.half is None else rows.reshape(2, count // 2, -1)[place.part.half]


def take_columns(weight: PackedWeight | Tensor, columns: Order) -> PackedWeight | Tensor:
    """The weight's columns in another order; plain where whole groups do not move together."""
    order = torch.from_numpy(columns)
    if isinstance(weight, Tensor):
        return weight[:, order]
    groups = weight.scale.shape[1]
    size = len(columns) // groups
    whole = columns.reshape(groups, size)
    together = bool((whole - whole[:, :1] == np.arange(size)).all()) and not (whole[:, 0] % size).any()
    if weight.perm is not None or not (together or groups == 1):
        return dequantize(weight)[:, order]
    of_groups = torch.from_numpy(whole[:, 0] // size) if groups > 1 else torch.zeros(1, dtype=torch.int64)
    offset = None if weight.offset is None else weight.offset[:, of_groups]
    return replace(weight, codes=weight.codes[:, order], scale=weight.scale[:, of_groups], offset=offset, tiles=None)


def _plain(stored: TensorEntry, rows: NDArray[np.uint8]) -> Tensor:
    """Floats (N, K) out of bytes (N, bytes of a row)."""
    dtype = {F16: torch.float16, BF16: torch.bfloat16}.get(stored.kind, torch.float32)
    return torch.from_numpy(rows).view(dtype)


def _matrix(stored: TensorEntry, part: Part) -> tuple[int, int]:
    """The rows that a tensor of several holds, of how many inputs."""
    shape = stored.shape
    if part.turned == "heads":
        return shape[0] * shape[2], shape[1]
    return math.prod(shape[:-1]), shape[-1]


def _places(header: Header, config: Mapping[str, Any]) -> dict[str, list[Place]]:
    """Where every tensor of transformers' is. Raises UserError for one of llama.cpp's that is none of them."""
    architecture = str(header.metadata["general.architecture"])
    try:
        a = describe(dict(config))
    except UserError as error:
        raise UserError(f"{header.path.name}: {error}") from error
    if a is None:
        raise UserError(f"{header.path.name}: this variant of {architecture} is not run; give another model")
    known: dict[str, list[Part]] = {}
    for part in (*parts(a, FORMS[architecture]), *alternatives(a, FORMS[architecture])):
        known.setdefault(part.tensor, []).append(part)
    places: dict[str, list[Place]] = {}
    for name, entry in header.tensors.items():
        if name in (ROPE_FACTORS, *LONGROPE_FACTORS.values()) or _beyond(name, a.layers, header):
            continue
        if name not in known:
            raise UserError(
                f"{header.path.name}: tensor {name} is of no {architecture} model that is run here; give the original"
                " model directory"
            )
        for part in known[name]:
            _check(header, entry, part)
            for index, ours in enumerate(part.names):
                if ours in places and part.rows is None:
                    other = places[ours][0].part.tensor
                    raise damaged(header.path.name, f"tensors {other} and {name} hold the same weights")
                places.setdefault(ours, []).append(Place(part, index if part.stacked else None))
    if not a.tied and HEAD not in header.tensors:
        places[f"{a.names.head}.weight"] = places[f"{a.names.embedding}.weight"]
    return places


def _numbers(header: Header, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are in the metadata. Raises UserError where there are not so many numbers."""
    a = describe(dict(config))
    for one in () if a is None else numbers(a):
        found = header.metadata.get(one.key)
        said = np.full(len(one.names), found) if isinstance(found, float) else found
        if not isinstance(said, np.ndarray) or said.shape != (len(one.names),) or said.dtype.kind != "f":
            raise damaged(header.path.name, f"{one.key} must have a number for each of {len(one.names)} layers")
        yield from zip(one.names, torch.from_numpy(said.astype(np.float32)).view(-1, *one.shape), strict=True)


def _beyond(name: str, layers: int, header: Header) -> bool:
    """Whether a tensor is of a layer that predicts further tokens."""
    more = header.metadata.get(f"{header.metadata['general.architecture']}.nextn_predict_layers", 0)
    return isinstance(more, int) and any(name.startswith(f"blk.{layers + i}.") for i in range(min(more, 16)))


def _check(header: Header, entry: TensorEntry, part: Part) -> None:
    """Raises UserError for a tensor whose form is not its part's."""
    expected, sound = "a matrix or a plain vector", len(entry.shape) == 2
    if part.stacked:
        count = len(part.names)
        sizes = (2,) if part.vector else (3,)
        expected, sound = f"{count} matrices", len(entry.shape) in sizes and entry.shape[0] == count
        if part.half is not None and sound:
            expected, sound = f"{count} matrices of two halves", entry.shape[1] % 2 == 0
    elif part.heads > 1:
        rows = 0 if part.rows is None or len(entry.shape) != 3 else len(part.rows)
        expected, sound = f"matrices of {part.heads} heads", rows == _matrix(entry, part)[0] if rows else False
    elif entry.kind.plain:
        sound = len(entry.shape) in (1, 2)
    size = 0 if part.shape is None else math.prod(part.shape)
    if size > 0 and math.prod(entry.shape) != size:
        expected, sound = f"{size} numbers", False
    if not entry.kind.plain and (part.shape is not None or (part.stacked and part.vector)):
        expected, sound = "floats", False
    if not sound:
        what = f"tensor {entry.name} must be {expected}, found {entry.kind.name} {list(entry.shape)}"
        raise damaged(header.path.name, what)


def to_packed(shown: str, stored: TensorEntry, groups: Groups) -> PackedWeight:
    """Blocks as a packed weight: the same values. Raises UserError for scales that are not finite and damaged codes."""
    kind, bits = _KINDS[stored.kind.name]
    codes, scale = torch.from_numpy(groups.codes), torch.from_numpy(groups.scale)
    offset = None if groups.offset is None else torch.from_numpy(groups.offset)
    for part in (scale,) if offset is None else (scale, offset):
        check_finite(f"{shown}: {stored.name} (scales)", part)
    size = codes.shape[1] // scale.shape[1]
    if kind == "ternary":
        return _ternary(shown, stored, codes, scale, size)
    return PackedWeight(Scheme(kind, bits, size, offset is None, "int8-group"), codes, scale, offset)


def _ternary(shown: str, stored: TensorEntry, codes: Tensor, scale: Tensor, size: int) -> PackedWeight:
    """One scale for the tensor where its blocks have the same; one without codes may have any."""
    if bool((codes > 1).any()):
        what = f"tensor {stored.name} holds the two-bit code 3, which ternary weights do not have"
        raise damaged(shown, what)
    used = scale[(codes.view(*scale.shape, size) != 0).any(-1)]
    if used.numel() == 0 or bool((used == used[0]).all()):
        one = used[:1] if used.numel() else scale.flatten()[:1]
        return PackedWeight(ternary.scheme(), codes, one.expand(codes.shape[0], 1).contiguous())
    return PackedWeight(Scheme("ternary", 2, size, True, "int8-group"), codes, scale)


class GgufCheckpoint(Checkpoint):
    """A Checkpoint whose `path` is a file, whose `config` comes from metadata, and whose layers are blocks."""

    shards: GgufTensors

    def weight(self, prefix: str, unpack: bool = True) -> PackedWeight | Tensor:
        """See Checkpoint.weight. Codes are always unpacked: a file's nibbles are in another order than ours."""
        found = self.shards.weight(f"{prefix}.weight")
        bias = f"{prefix}.bias"
        if isinstance(found, Tensor) or bias not in self.shards:
            return found
        return replace(found, bias=self.shards[bias].float())


def open_gguf(path: Path) -> GgufCheckpoint:
    """Opens a GGUF file: reads and checks its header, no weights.

    Raises UserError, in one sentence that names the file, for whatever is wrong with it.
    """
    header = read_header(path)
    config = configure(header)
    return GgufCheckpoint(path, config, GgufTensors(header, config))
