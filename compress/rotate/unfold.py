"""A rotated model, plain or packed, as a plain one in the basis of its original: for a look at its weights."""

import json
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from compress.artifact import safetensors
from compress.artifact.files import write_json
from compress.errors import UserError
from compress.export import prefixes
from compress.model import directory
from compress.model.structure import read_structure
from compress.rotate.shards import RebasedShards
from runtime import formats
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.rotation import NORMS, rotation_of
from runtime.checkpoints.safetensors import Entry, Shards


class PlainShards(Shards):
    """A packed checkpoint's tensors with what its codes stand for in their place, in the type of the other tensors."""

    def __init__(self, checkpoint: Checkpoint):
        self.directory, self.files = checkpoint.shards.directory, checkpoint.shards.files
        self._checkpoint = checkpoint
        self._packed = set(prefixes(checkpoint.names()))
        self._entries: dict[str, Entry] = {}
        for name in checkpoint.names():
            prefix, _, leaf = name.rpartition(".")
            if prefix not in self._packed or leaf == "bias":
                self._entries[name] = checkpoint.shards.entry(name)
        floats = [entry for entry in self._entries.values() if len(entry.shape) > 1] or list(self._entries.values())
        largest = max(floats, key=lambda entry: prod(entry.shape))
        self._dtype = next(dtype for dtype, name in safetensors.NAMES.items() if name == largest.dtype)
        for prefix in self._packed:
            shape = checkpoint.weight(prefix).shape
            self._entries[f"{prefix}.weight"] = Entry(largest.file, largest.dtype, tuple(shape))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __getitem__(self, name: str) -> Tensor:
        self.entry(name)
        prefix = name.removesuffix(".weight")
        if prefix not in self._packed or name == prefix:
            return self._checkpoint.tensor(name)
        found = self._checkpoint.weight(prefix)
        return (found if isinstance(found, Tensor) else formats.dequantize(found)).to(self._dtype)


def unfold(folder: Path, out: Path, shard_bytes: int) -> None:
    """Writes the rotated model in `folder` to `out`, plain and in the basis of its original.

    What was only rotated comes back as it was, but for rounding in the checkpoint's type; of what was packed since come
    the weights that its codes stand for. Raises UserError for a model that is not rotated.
    """
    checkpoint = open_checkpoint(folder)
    record = rotation_of(checkpoint.config)
    if record is None:
        raise UserError(
            f"{folder.name}: expected specpress.rotation in its configuration, found none: nothing is rotated"
        )
    if checkpoint.path.is_file():
        raise UserError(f"{folder.name}: a GGUF file has no norms as they were before: unfold the run it was made of")
    if out.exists():
        raise UserError(f"{out}: expected a folder that is not there yet, found one: name another")
    if checkpoint.quantization is not None:
        checkpoint = replace(checkpoint, shards=PlainShards(checkpoint))
    norms = dict(Shards(checkpoint.path, NORMS)) if record.residual else {}
    shards = RebasedShards(checkpoint, read_structure(checkpoint.path), record, norms, back=True)
    with torch.no_grad():
        directory.write_model(shards.parts(), checkpoint.path, out, shard_bytes)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    del config["specpress"]["rotation"]
    if not config["specpress"]:
        del config["specpress"]
    if record.untied:
        config["tie_word_embeddings"] = True
    write_json(out / "config.json", config)
