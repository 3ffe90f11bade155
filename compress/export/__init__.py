"""Exports: a finished model in the forms that other engines read. One line of `FORMATS` per form.

An exporter is a function `(model, out, progress) -> Exported`: `model` is the artifact's `model/` (any directory that
`runtime.checkpoints.open.open_checkpoint` takes), `out` an empty folder that it fills, `progress` counts layers as
`progress("export NAME", done, total)`. It repacks calibrated codes wherever its form can hold them; where it rounds
again it says so, layer by layer, in `Exported.losses`; where it can do neither it raises UserError. `run` makes the
folder, so that a failed export leaves nothing. Its module has `refusal(kinds) -> str | None`, too, which says before a
run begins why layers of these kinds (runtime.formats.packed.Kind, as a frozenset) cannot be exported.
"""

import importlib
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.artifact import files
from compress.errors import UserError
from compress.progress import Progress, silent
from compress.recipe.exports import check_exports
from runtime.formats.schemes import KINDS

FORMATS: dict[str, str] = {
    "gptq": "compress.export.gptq:write",
    "awq": "compress.export.awq:write",
    "compressed-tensors": "compress.export.compressed_tensors:write",
    "bitsandbytes": "compress.export.bitsandbytes:write",
    "bitnet": "compress.export.bitnet:write",
    "gguf": "compress.export.gguf.file:write",
    "onnx": "compress.export.onnx.model:write",
    "onnx-fp16": "compress.export.onnx.model:write_fp16",
}
"""Name → "module:function" of its exporter, imported when it is used."""

# Kinds of codes that exporters can repack or round again; any other is held by the library whose format it is, alone.
_REPACKED = frozenset({"int8", "int6", "int4", "nf4", "ternary", "ternary-1.25", "trellis"})
# A packed layer has one of these, whatever its format; a plain one has none.
_MARKS = (".weight_packed", ".weight_scale", ".qweight", ".SCB", ".weight.quant_state.bitsandbytes__nf4")
ABOUT = "export.json"
"""In every export: its `Exported`, and the mark by which a folder is known for one."""


@dataclass(frozen=True)
class Loss:
    """A layer that was rounded again. error: ‖W' − W‖ / ‖W‖, W the artifact's weight and W' the export's."""

    layer: str
    error: float


@dataclass(frozen=True)
class Exported:
    """What an export came to.

    name      the form.
    bytes     of its weights, all files.
    repacked  layers whose weights are exactly the artifact's.
    losses    those that were rounded again.
    notes     sentences on what a user of the export has to know: who reads it, what was left out.
    """

    name: str
    bytes: int
    repacked: int
    losses: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> Loss | None:
        """The layer that lost most; None where none lost anything."""
        return max(self.losses, key=lambda loss: loss.error, default=None)

    def sentences(self) -> list[str]:
        """What was kept, what was lost, and the notes."""
        out = [f"{self.repacked} layers repacked: exactly the artifact's weights."] if self.repacked else []
        if (worst := self.worst) is not None:
            mean = sum(loss.error for loss in self.losses) / len(self.losses)
            out.append(
                f"{len(self.losses)} layers rounded again: relative error {mean:.2g} on average,"
                f" {worst.error:.2g} at worst ({worst.layer})."
            )
        return [*out, *self.notes]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as report.json and manifest.json have it."""
        worst = self.worst
        return {
            "name": self.name,
            "bytes": self.bytes,
            "repacked": self.repacked,
            "requantized": [asdict(loss) for loss in self.losses],
            "worst": None if worst is None else asdict(worst),
            "notes": list(self.notes),
        }


def names_in(text: str) -> list[str]:
    """The names in "gptq, awq"."""
    return [name.strip() for name in text.split(",") if name.strip()]


def told(*sentences: object) -> tuple[str, ...]:
    """The sentences that there are: `told(slow and "It is slow.")` is empty where `slow` is false or None."""
    return tuple(sentence for sentence in sentences if sentence and isinstance(sentence, str))


def refusal(name: str, kinds: Collection[str]) -> str | None:
    """Why a form cannot hold layers of these kinds; None where it can."""
    for kind in sorted(set(kinds) - _REPACKED):
        if (library := KINDS[kind].library) != name:
            return f"expected weights other than {kind}, which {library} alone holds"
    # What a layer is and what it is taken for: a form has to hold both.
    kinds = {*kinds, *(taken for kind in kinds if (taken := KINDS[kind].exported_as))}
    why: str | None = importlib.import_module(FORMATS[name].split(":")[0]).refusal(frozenset(kinds))
    return why


def check_kinds(names: Sequence[str], kinds: Collection[str]) -> None:
    """Raises UserError where one of the forms cannot hold layers of these kinds: known before any work is done."""
    for name in check_exports(names):
        if (why := refusal(name, kinds)) is not None:
            raise UserError(f"export {name}: {why}")


def run(name: str, model: Path, out: Path, progress: Progress = silent, force: bool = False) -> Exported:
    """Exports a model directory to the folder `out`, which appears when all of it is there.

    force  replace an export that is there. Raises UserError for an unknown name, a folder that is not empty, and what
    the form cannot hold.
    """
    check_exports([name])
    if out.exists() and not out.is_dir():
        raise UserError(f"{out.name}: expected a folder for the export, found a file: choose another with --out")
    there = out.is_dir() and any(out.iterdir())
    if there and not force:
        raise UserError(f"{out.name} is not empty: replace it with --force, or choose another folder with --out")
    if there and not (out / ABOUT).is_file():
        raise UserError(
            f"{out.name} was not written by an export, so --force does not replace it: choose another --out"
        )
    _check_first(name, model)
    module, function = FORMATS[name].split(":")
    exporter: Callable[[Path, Path, Progress], Exported] = getattr(importlib.import_module(module), function)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        exported = exporter(model, partial, progress)
        files.write_json(partial / ABOUT, exported.to_dict())
        _replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return exported


def prefixes(names: Sequence[str]) -> list[str]:
    """The packed layers among the tensors of a checkpoint, in the order of their names."""
    found = {name.removesuffix(mark): None for name in names for mark in _MARKS if name.endswith(mark)}
    return list(found)


def _check_first(name: str, model: Path) -> None:
    """Refuses by the first packed layer what most exporters would find after more work."""
    from runtime.checkpoints.open import open_checkpoint
    from runtime.formats.packed import PackedWeight

    checkpoint = open_checkpoint(model)
    for prefix in prefixes(checkpoint.names())[:1]:
        if isinstance(weight := checkpoint.weight(prefix), PackedWeight):
            check_kinds([name], {weight.scheme.kind})


def _replace(partial: Path, out: Path) -> None:
    """Puts a finished folder in its place; an older one there is moved aside first and deleted last."""
    aside = out.with_name(out.name + ".replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if out.exists():
        files.rename(out, aside)
    files.rename(partial, out)
    files.sync_folder(out.parent)
    shutil.rmtree(aside, ignore_errors=True)
