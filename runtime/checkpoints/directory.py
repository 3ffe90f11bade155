"""Reads a model directory, ours or anybody's: config.json and safetensors, plain or packed, one tensor at a time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from runtime import formats
from runtime.checkpoints.safetensors import Shards
from runtime.errors import UserError
from runtime.formats.packed import PackedWeight


@dataclass(frozen=True)
class Checkpoint:
    """A model directory whose headers have been read and checked.

    path    the directory itself (for a run folder its `model/`); or a GGUF file (runtime/checkpoints/gguf/).
    config  config.json, or what the GGUF file's metadata says in its words.
    shards  the tensors, read when asked for.
    """

    path: Path
    config: dict[str, Any]
    shards: Shards

    @property
    def quantization(self) -> dict[str, Any] | None:
        """`quantization_config` of config.json; None for plain weights."""
        return self.config.get("quantization_config")

    @property
    def tied(self) -> bool:
        """Whether the head has no weight of its own on disk: it is the embedding."""
        return not any(name.startswith(("lm_head.", "embed_out.")) for name in self.shards)

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return list(self.shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it. Raises UserError where it is missing."""
        return self.shards.entry(name).shape

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored; it may share the file's memory, so it is not for writing to.

        Raises UserError naming it where it is missing or cannot be read.
        """
        return self.shards[name]

    def weight(self, prefix: str, unpack: bool = True) -> PackedWeight | Tensor:
        """The weight of linear layer `prefix`: packed (bias included), or plain as stored, (N, K) for nn.Linear.

        `unpack` False leaves 4-bit codes two a byte where they are stored so (PackedWeight.nibbles).

        Raises UserError naming the tensor that is missing, damaged or in a layout that is not read yet.
        """
        try:
            return formats.read(self.quantization, self.shards, prefix, unpack)
        except UserError as error:
            text = str(error)
            raise UserError(text if text.startswith(self.path.name) else f"{self.path.name}: {text}") from error

    def bytes_on_disk(self) -> int:
        """Sizes of the safetensors files together, headers included."""
        return sum(file.stat().st_size for file in self.shards.files)
