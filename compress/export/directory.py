"""Writes an export that is a Hugging Face directory, a layer at a time, and measures what each layer lost."""

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.artifact import files, safetensors
from compress.export import Exported, Loss, Progress, check_kinds, told
from compress.export.layers import CACHE_SCALES, NOTHING_PACKED, Facts, Model, survey, weight_of
from compress.model import directory
from compress.quantize.rtn import relative_error
from runtime import formats
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import as_stored

# Bytes of tensors that are collected before they are written.
_PART = 64 << 20
Store = Callable[[Facts, PackedWeight], dict[str, Tensor]]


@dataclass(frozen=True)
class Form:
    """How a model is to be written.

    quantization  `quantization_config` of config.json.
    store         a layer's tensors; they may stand for other weights than the layer's, which is then measured.
    notes         what a user has to know.
    plain         layers that the form has no place for: they are stored in the model's own type.
    """

    quantization: Mapping[str, Any]
    store: Store
    notes: tuple[str, ...] = ()
    plain: Collection[Facts] = ()


@dataclass(frozen=True)
class Layout:
    """An export that is a Hugging Face directory: a row each, which the modules of the layouts have.

    name     of the export, and the `quant_method` of models that are in this layout already: those are copied.
    refused  kinds of codes that it cannot hold, and why.
    form     how a model is to be written.
    """

    name: str
    refused: Mapping[str, str]
    form: Callable[[Model], Form]

    def refusal(self, kinds: Collection[str]) -> str | None:
        """Why models with layers of these kinds cannot be exported; None where they can."""
        return next((why for kind, why in self.refused.items() if kind in kinds), None) if kinds else NOTHING_PACKED

    def write(self, model: Path, out: Path, progress: Progress) -> Exported:
        found = survey(model)
        if found.method == self.name:
            return _copy(found, out, progress)
        check_kinds([self.name], {layer.scheme.kind for layer in found.packed})
        return _write(self.name, found, self.form(found), out, progress)


def evenly_spaced(form: str) -> dict[str, str]:
    """What `form`, which holds integers, refuses."""
    return {
        "nf4": f"{form} holds evenly spaced codes, found nf4, whose codes are not: compress with an int4 recipe, or"
        " export to bitsandbytes"
    }


def _write(name: str, model: Model, form: Form, out: Path, progress: Progress) -> Exported:
    """Fills the folder `out` with the model in another form.

    Every layer is read back from the tensors that are written, so that `losses` are measured and not believed. Raises
    UserError for tensors that cannot be read, and ValueError where a form stores what it cannot read: our mistake.
    """
    checkpoint = model.checkpoint
    packed = {layer.prefix for layer in model.packed}
    # A linear layer has nothing below it but its own tensors, whose names have a dot or two more.
    others = [n for n in checkpoint.names() if not any(n.rsplit(".", dots)[0] in packed for dots in (1, 2, 3))]
    scales = form.quantization.get("quant_method") == "compressed-tensors"
    kept = [plain for plain in others if scales or not plain.endswith(CACHE_SCALES)]
    losses: list[Loss] = []

    def tensors() -> Iterator[dict[str, Tensor]]:
        for plain in kept:
            yield {plain: checkpoint.tensor(plain)}
        for done, layer in enumerate(model.packed):
            progress(f"export {name}", done, len(model.packed))
            weight = weight_of(checkpoint, layer.prefix)
            assert isinstance(weight, PackedWeight)
            stored = _dense(layer, weight, model) if layer in form.plain else form.store(layer, weight)
            back = formats.read(form.quantization, stored, layer.prefix)
            before = formats.dequantize(weight)
            after = formats.dequantize(back) if isinstance(back, PackedWeight) else back.float()
            if not before.equal(after):
                losses.append(Loss(layer.prefix, relative_error(before, after)))
            yield stored

    parts = out / "parts"
    names = safetensors.join(_in_parts(tensors(), parts), out)
    shutil.rmtree(parts)
    directory.write_beside(checkpoint.path, out, form.quantization)
    progress(f"export {name}", len(model.packed), len(model.packed))
    size = sum((out / file).stat().st_size for file in names if file.endswith(".safetensors"))
    left_out = "The cache's static scales, which are compressed-tensors' own, are left out."
    notes = told(*form.notes, len(kept) < len(others) and left_out)
    return Exported(name, size, len(model.packed) - len(losses), tuple(losses), notes)


def _in_parts(tensors: Iterable[Mapping[str, Tensor]], folder: Path) -> list[Path]:
    """Files of some tensors each, so that few are in memory at a time."""
    folder.mkdir()
    paths: list[Path] = []
    waiting: dict[str, Tensor] = {}
    held = 0

    def flush() -> None:
        paths.append(folder / f"part-{len(paths):06d}.safetensors")
        safetensors.write_part(paths[-1], waiting)
        waiting.clear()

    for some in tensors:
        waiting |= some
        held += sum(tensor.nbytes for tensor in some.values())
        if held >= _PART:
            flush()
            held = 0
    if waiting:
        flush()
    return paths


def _copy(model: Model, out: Path, progress: Progress) -> Exported:
    """The export of a model that is in this form already: the same tensors."""
    checkpoint, name = model.checkpoint, model.method
    assert name is not None and checkpoint.quantization is not None
    progress(f"export {name}", 0, 1)
    for file in (*checkpoint.shards.files, checkpoint.path / safetensors.INDEX):
        if file.is_file():
            files.copy_synced(file, out / file.name)
    directory.write_beside(checkpoint.path, out, checkpoint.quantization)
    progress(f"export {name}", 1, 1)
    return Exported(name, checkpoint.bytes_on_disk(), len(model.packed))


def _dense(layer: Facts, weight: PackedWeight, model: Model) -> dict[str, Tensor]:
    """A layer that a form has no place for, in the model's own type."""
    tensors = {f"{layer.prefix}.weight": formats.dequantize(weight).to(model.dtype)}
    if weight.bias is not None:
        tensors[f"{layer.prefix}.bias"] = as_stored(f"{layer.prefix}.bias", weight.bias, model.dtype)
    return tensors
