"""The stage `rotate`: a plain directory with the same model in another basis, which later stages pack.

R1 and R2 of fold.py change no answer of the model in float32; its norms and, where the head was the embedding, the
head change with them (runtime/checkpoints/rotation.py says what is written). unfold.py gives the model back.
"""

from pathlib import Path
from typing import Any

import torch

from compress.artifact import safetensors
from compress.artifact.files import sync_folder
from compress.errors import UserError
from compress.model import directory
from compress.model.structure import ModelStructure
from compress.recipe.block_stages import Rotate
from compress.rotate.shards import RebasedShards, plan_rotation
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.rotation import NORMS, RotationRecord, rotation_of


def plan(checkpoint: Checkpoint, structure: ModelStructure, stage: Rotate, seed: int) -> RotationRecord:
    """What the stage comes to for a model. Raises UserError for one that it cannot rotate, or that is rotated."""
    if rotation_of(checkpoint.config) is not None:
        raise UserError(f"{checkpoint.path.name}: its weights are rotated already: leave the stage rotate out")
    return plan_rotation(checkpoint, structure, stage.residual, stage.values, seed)


def rotate(
    checkpoint: Checkpoint, structure: ModelStructure, record: RotationRecord, out: Path, shard_bytes: int
) -> None:
    """Writes the rotated model to `out`, in the types that its tensors have."""
    shards = RebasedShards(checkpoint, structure, record)
    directory.write_model(shards.parts(), checkpoint.path, out, shard_bytes, None, record.changed(checkpoint.config))
    if norms := shards.original_norms():
        (out / NORMS).parent.mkdir()
        safetensors.write_part(out / NORMS, norms)
        sync_folder((out / NORMS).parent)


def report(checkpoint: Checkpoint, structure: ModelStructure, record: RotationRecord) -> dict[str, Any]:
    """What the run says of it: sizes, and bytes of the head that is no longer the embedding."""
    said: dict[str, Any] = {"residual": record.residual, "values": record.values, "seed": record.seed}
    if record.untied:
        added = sorted(set(RebasedShards(checkpoint, structure, record)) - set(checkpoint.names()))
        sizes = (torch.Size(checkpoint.shape(structure.tied[name])).numel() for name in added)
        width = safetensors.WIDTHS[checkpoint.shards.entry(structure.tied[added[0]]).dtype]
        said["untied_bytes"] = sum(sizes) * width
    return said


def line(said: dict[str, Any]) -> str:
    """One line for people."""
    what = [f"the residual stream ({said['residual']} channels)"] if said["residual"] else []
    what += [f"values (heads of {said['values']})"] if said["values"] else []
    untied = said.get("untied_bytes")
    more = "" if untied is None else f"; the tied head is untied: {untied / 1e6:.1f} MB more"
    return f"rotate: rotated {' and '.join(what)}, folded into the weights{more}"
