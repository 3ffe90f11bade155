"""A GGUF file as a checkpoint: tensors under transformers' names, blocks as the formats that our kernels run."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.gguf.blocks import Groups, unpack
from runtime.checkpoints.gguf.config import HEAD, configure
from runtime.checkpoints.gguf.names import ROPE_FACTORS, Place, from_gguf, rows_here
from runtime.checkpoints.gguf.reader import BF16, F16, Header, TensorEntry, damaged, read_header
from runtime.checkpoints.safetensors import Entry, Shards
from runtime.errors import UserError
from runtime.formats import dequantize, ternary
from runtime.formats.packed import Kind, PackedWeight, Scheme
from runtime.formats.tensors import check_finite

_KINDS: dict[str, tuple[Kind, int]] = (
    dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), ("int4", 4))
    | dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"), ("int8", 8))
    | dict.fromkeys(("TQ1_0", "TQ2_0"), ("ternary", 2))
)


class GgufTensors(Shards):
    """Tensors by transformers' names; quantised ones are float32 when they are asked for as tensors.

    As with safetensors every read maps the file anew and lets it go.
    """

    def __init__(self, header: Header, config: Mapping[str, Any]):
        """Raises UserError for tensors that the architecture does not have."""
        self.header, self.directory, self.files = header, header.path.parent, (header.path,)
        self._heads = {"query": config["num_attention_heads"], "key": config["num_key_value_heads"]}
        self._places = _places(header, config)
        if not config["tie_word_embeddings"] and HEAD not in header.tensors:
            self._places["lm_head.weight"] = self._places["model.embed_tokens.weight"]
        self._entries = {name: self._entry(place) for name, place in sorted(self._places.items())}

    def _entry(self, place: Place) -> Entry:
        """File, dtype ("F32" for quantised tensors) and shape."""
        stored = self.header.tensors[place.tensor]
        shape = stored.shape if place.expert is None else stored.shape[1:]
        return Entry(self.header.path, stored.kind.name if stored.kind.plain else "F32", shape)

    def entry(self, name: str) -> Entry:
        if name not in self:
            raise UserError(f"{self.header.path.name}: tensor {name} is missing; the file is incomplete")
        return self._entries[name]

    def __getitem__(self, name: str) -> Tensor:
        found = self.weight(name)
        return dequantize(found) if isinstance(found, PackedWeight) else found

    def weight(self, name: str) -> PackedWeight | Tensor:
        """A tensor as it is stored, its rows in transformers' order: packed (N, K), or plain.

        Raises UserError naming the tensor for one that is missing, cannot be read, or has scales that are not finite.
        """
        shape, place = self.entry(name).shape, self._places[name]
        stored = self.header.tensors[place.tensor]
        rows = self._rows(stored, place, shape)
        if not stored.kind.plain:
            return to_packed(self.header.path.name, stored, unpack(stored.kind, rows))
        dtype = {F16: torch.float16, BF16: torch.bfloat16}.get(stored.kind, torch.float32)
        values = torch.from_numpy(rows).view(dtype).reshape(shape)
        return values.float() - 1.0 if place.plus_one else values

    def _rows(self, stored: TensorEntry, place: Place, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """(N, bytes of a row), or (1, bytes) for a vector: a copy, in transformers' order."""
        count = math.prod(shape[:-1])
        size = count * stored.kind.row_bytes(shape[-1])
        start = stored.start + size * (place.expert or 0)
        try:
            mapped = np.memmap(self.header.path, np.uint8, "r", offset=start, shape=(size,))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.header.path.name}: tensor {stored.name} cannot be read: {error}") from error
        if place.rotated is None:
            return np.array(mapped).reshape(count, -1)
        try:
            # A bias has a value where a weight has a row.
            order = rows_here(shape[0], self._heads[place.rotated])
        except ValueError as error:
            raise UserError(f"{self.header.path.name}: tensor {stored.name}: {error}") from error
        return np.array(mapped).reshape(shape[0], -1)[order].reshape(count, -1)


def _places(header: Header, config: Mapping[str, Any]) -> dict[str, Place]:
    """Where every tensor of transformers' is. Raises UserError for one of llama.cpp's that is none of them."""
    architecture = str(header.metadata["general.architecture"])
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    places: dict[str, Place] = {}
    for name, entry in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        found = from_gguf(name, architecture, experts)
        if not found:
            raise UserError(
                f"{header.path.name}: tensor {name} is of no {architecture} model that is run here; give the original"
                " model directory"
            )
        expected, sound = "a matrix or a plain vector", len(entry.shape) == 2
        if any(place.expert is not None for place in found.values()):
            expected, sound = f"{experts} matrices", len(entry.shape) == 3 and entry.shape[0] == experts
        elif entry.kind.plain:
            sound = len(entry.shape) in (1, 2)
        if not sound:
            what = f"tensor {name} must be {expected}, found {entry.kind.name} {list(entry.shape)}"
            raise damaged(header.path.name, what)
        places |= found
    return places


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
