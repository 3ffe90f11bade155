"""The target in the basis that a recipe's stage `rotate` gives it: what all other stages then work on."""

import shutil

from compress.artifact import files
from compress.artifact.journal import Journal
from compress.model.source import Source
from compress.pipeline.inputs import RunInputs
from compress.rotate import stage as rotations
from compress.training import contract
from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.rotation import RotationRecord


def check(inputs: RunInputs) -> RotationRecord | None:
    """What the recipe's rotation comes to; None where it has none. Raises UserError for a model that it cannot turn."""
    stage = inputs.context.recipe.rotate
    if stage is None:
        return None
    return rotations.plan(inputs.target.checkpoint, inputs.structure, stage, inputs.context.seed)


def target(inputs: RunInputs, journal: Journal) -> Source:
    """The target, or what the stage rotate makes of it in its folder of the partial one, once."""
    record = check(inputs)
    if record is None:
        return inputs.target
    kinds = [stage.kind for stage in inputs.context.recipe.stages]
    home = contract.place(journal.folder, kinds.index("rotate"), "rotate")
    if home.name in journal.stages:
        out = contract.finished(home, journal).out
    else:
        out, making = home / "out", home / "out.tmp"
        shutil.rmtree(home, ignore_errors=True)
        checkpoint, structure = inputs.target.checkpoint, inputs.structure
        rotations.rotate(checkpoint, structure, record, making, inputs.context.shard_bytes)
        said = rotations.report(checkpoint, structure, record)
        files.rename(making, out)
        contract.keep(home, journal, said)
        inputs.context.note(rotations.line(said))
    return Source(inputs.target.name, open_checkpoint(out))
