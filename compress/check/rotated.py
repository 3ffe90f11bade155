"""An original in the basis that the checked model says it is in: what is rotated is compared with what is turned."""

from dataclasses import replace

from compress.check.findings import Finding
from compress.check.opening import Opened
from compress.errors import UserError
from compress.model.structure import read_structure
from compress.rotate.shards import RebasedShards
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.rotation import rotation_of
from runtime.errors import UserError as RuntimeFloorError

_WHERE = "config.json: specpress.rotation"


def in_basis(opened: Opened, source: Opened, findings: list[Finding]) -> Opened:
    """The original `source` as the model in `opened` has it, but plain; itself where nothing is rotated.

    A finding says what was done, or why it could not be.
    """
    try:
        record = rotation_of(opened.config)
        if record is None or rotation_of(source.config) is not None:
            return source
        if source.header is not None or source.quantization is not None:
            raise UserError("the original's weights are packed, and only plain ones can be rotated as these were")
        checkpoint = Checkpoint(source.path, source.config, source.tensors)
        tensors = RebasedShards(checkpoint, read_structure(source.path), record)
    except (UserError, RuntimeFloorError) as error:
        findings.append(Finding(level="suspicious", kind="config", where=_WHERE, says=str(error)))
        return source
    what = [f"the residual stream ({record.residual})"] if record.residual else []
    what += [f"values (heads of {record.values})"] if record.values else []
    says = f"{' and '.join(what)} are rotated: weights are compared with the original's after the same rotation"
    findings.append(Finding(level="note", kind="config", where=_WHERE, says=says))
    return replace(source, config={**source.config, **record.changed(source.config)}, tensors=tensors)
