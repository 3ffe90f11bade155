"""What the directories of drafters that were trained for one target have in common: a description in JSON, the weights
in safetensors, and the digest of the target's weights."""

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.safetensors import Shards, inside
from runtime.errors import UserError
from runtime.files import read_json

AGAIN = "train it again, or copy the file again"


def read_fields(
    folder: Path, name: str, kind: type, version: int, later: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The fields of a dataclass from a JSON file that holds them and its `version`; `later`: what those are in files
    that were written before there were such fields.

    Raises UserError naming the file, and the key that is missing, unknown, or no whole number, truth or text although
    the field is; what lists hold is for the caller to check.
    """
    data = dict(later) | read_json(inside(folder, name, name))
    shown = f"{folder.name}/{name}"
    found = data.pop("version", None)
    if found != version:
        raise UserError(
            f"{shown}: version must be {version}, found {found!r}; train the drafter again with this Specpress"
        )
    kinds = {field.name: field.type for field in fields(kind)}
    for key in sorted(kinds.keys() ^ data.keys()):
        raise UserError(f"{shown}: the key {key} is {'missing' if key in kinds else 'unknown'}; {AGAIN}")
    for key, wanted in kinds.items():
        if wanted in (int, bool, str) and type(data[key]) is not wanted:
            raise UserError(
                f"{shown}: {key} must be of type {wanted.__name__}, found {data[key]!r}; copy the file again"  # type: ignore[union-attr]
            )
    return data


def read_tensors(folder: Path, name: str, shapes: Mapping[str, tuple[int, ...]], description: str) -> dict[str, Tensor]:
    """The tensors of these shapes, as stored. Raises UserError naming one that is missing or misshapen, and the file
    that implies it."""
    shards = Shards(folder, name)
    for tensor, shape in shapes.items():
        found = shards.entry(tensor).shape if tensor in shards else "none"
        if found != shape:
            raise UserError(
                f"{folder.name}/{name}: {description} implies the tensor {tensor} of shape {shape}, found {found}; the "
                "two files do not belong together"
            )
    return {tensor: shards[tensor] for tensor in shapes}


def require_target(digest: str, folder: Path, name: str, model: Path) -> None:
    """Raises UserError unless a drafter's description has the digest of the weights in the model's directory."""
    if digest != weights_digest(model):
        raise UserError(
            f"{folder.name}/{name}: these heads were trained on other weights than those of {model.name}; train "
            "heads for this model, or name the model that they belong to"
        )


def weights_digest(model: Path) -> str:
    """SHA-256 of the names and contents of a model directory's weight files."""
    digest = hashlib.sha256()
    for file in sorted(open_checkpoint(model).shards.files):
        with file.open("rb") as opened:
            digest.update(f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
