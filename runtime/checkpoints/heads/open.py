"""A published draft head as it is read: what it is, and its tensors under the record's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from runtime.checkpoints.heads.layouts import LEFT_OUT, Layout, layout_of
from runtime.checkpoints.heads.mtp import mtp_layout
from runtime.checkpoints.heads.record import HeadDescription
from runtime.checkpoints.safetensors import Shards, inside
from runtime.errors import UserError
from runtime.files import read_json


@dataclass(frozen=True)
class PublishedHead:
    """A head on disk: `tensors` as stored.

    own_block  how the names of its block's tensors begin, where it is one of a whole model's checkpoint; "": the
               block is among `tensors`.
    """

    about: HeadDescription
    tensors: Mapping[str, Tensor]
    own_block: str = ""


def kind_of(folder: Path) -> str | None:
    """Which drafter a folder's config.json is for; None where it is no draft head that is known, or not there."""
    if not (folder / "config.json").is_file():
        return None
    values = read_json(inside(folder, "config.json", "config.json"))
    layout = layout_of(values)
    return None if layout is None else layout.describe(values, f"{folder.name}/config.json").kind


def open_head(folder: Path, kind: str) -> PublishedHead:
    """The head in a folder; of "mtp" also the layer that a checkpoint of a whole model brings beside its blocks.

    Raises UserError naming the file, and the key or tensor that is missing, misshapen or unknown, and for a head of
    another kind.
    """
    shown = f"{folder.name}/config.json"
    values = read_json(inside(folder, "config.json", "config.json"))
    layout, own_block = layout_of(values), ""
    if layout is None and kind == "mtp":
        layout, own_block = mtp_layout(values, shown)
    if layout is None:
        raise UserError(
            f"{shown}: no draft head that is known, by its architectures {values.get('architectures')!r}; "
            "docs/speculation.md lists the layouts that are read"
        )
    if values.get("quantization_config") and not own_block:
        raise UserError(f"{shown}: the head is quantised, and heads are read as floats only; fetch the original")
    about = layout.describe(values, shown)
    if about.kind != kind:
        raise UserError(f"{shown}: a head for the drafter {about.kind}, not for {kind}; give --drafter {about.kind}")
    return PublishedHead(about, _tensors(Shards(folder), layout, about, bool(own_block)), own_block)


def _tensors(shards: Shards, layout: Layout, about: HeadDescription, beside: bool) -> dict[str, Tensor]:
    """All that the record wants, checked; beside: in the checkpoint of a whole model, which has other tensors, too."""
    known = tuple(old for old, _ in layout.renames)
    places = {renamed(name, layout): name for name in shards if not beside or name.startswith(known)}
    where, needed, optional = shards.directory.name, about.shapes(), about.optional()
    for name in sorted(places):
        if name not in needed and name not in optional and not name.startswith(LEFT_OUT):
            more = "; mixtures of experts are not run in heads" if "expert" in name or ".gate." in name else ""
            raise UserError(f"{where}: the tensor {places[name]} is none of a {about.kind} head of {layout.name}{more}")
    for name, shape in (optional | needed).items():
        found: Any = shards.entry(places[name]).shape if name in places else None
        if found != shape and (found is not None or name in needed):
            said = f"the tensor {places.get(name, stored(name, layout))} of shape {shape}"
            raise UserError(
                f"{where}: config.json implies {said}, found {'none' if found is None else found}; "
                "the files do not belong together"
            )
    return {name: shards[places[name]] for name in (optional | needed) if name in places}


def renamed(name: str, layout: Layout) -> str:
    """What the record calls a tensor of the file."""
    for old, new in layout.renames:
        if name.startswith(old):
            return f"{new}{name.removeprefix(old)}"
    return name


def stored(name: str, layout: Layout) -> str:
    """What a file of this layout calls a tensor of the record."""
    for old, new in layout.renames:
        if new and name.startswith(new):
            return f"{old}{name.removeprefix(new)}"
    return name
