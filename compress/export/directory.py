"""Writes an export that is a Hugging Face directory, a layer at a time, and measures what each layer lost."""

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.artifact import files, safetensors
from compress.errors import UserError
from compress.export import Exported, Loss, Progress
from compress.export.layers import CACHE_SCALES, NOTHING_PACKED, Facts, Model, survey
from compress.model import directory
from compress.quantize.rtn import relative_error
from runtime import formats
from runtime.cache import scheme
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
    """

    quantization: Mapping[str, Any]
    store: Store
    notes: tuple[str, ...] = ()


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
        """See compress.export."""
        found = survey(model)
        if found.method == self.name:
            return copy(self.name, found, out, progress)
        if (why := self.refusal({layer.scheme.kind for layer in found.packed})) is not None:
            raise UserError(f"export {self.name}: {why}")
        return write(self.name, found, self.form(found), out, progress)


@dataclass
class _Parts:
    """Tensors on their way into the files: few at a time in memory."""

    folder: Path
    paths: list[Path] = field(default_factory=list)
    waiting: dict[str, Tensor] = field(default_factory=dict)
    size: int = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        self.waiting |= tensors
        self.size += sum(tensor.nbytes for tensor in tensors.values())
        if self.size >= _PART:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            self.paths.append(self.folder / f"part-{len(self.paths):06d}.safetensors")
            safetensors.write_part(self.paths[-1], self.waiting)
            self.waiting, self.size = {}, 0


def write(name: str, model: Model, form: Form, out: Path, progress: Progress) -> Exported:
    """Fills the folder `out` with the model in another form.

    Every layer is read back from the tensors that are written, so that `losses` are measured and not believed. Raises
    UserError for tensors that cannot be read, and ValueError where a form stores what it cannot read: our mistake.
    """
    checkpoint = model.checkpoint
    stage = f"export {name}"
    parts = _Parts(out / "parts")
    parts.folder.mkdir()
    taken = _of_layers(model)
    scales = form.quantization.get("quant_method") == "compressed-tensors"
    dropped = 0
    for plain in checkpoint.names():
        if plain in taken:
            continue
        if plain.endswith(CACHE_SCALES) and not scales:
            dropped += 1
            continue
        parts.add({plain: checkpoint.tensor(plain)})
    losses, repacked = [], 0
    for done, layer in enumerate(model.packed):
        progress(stage, done, len(model.packed))
        weight = checkpoint.weight(layer.prefix)
        assert isinstance(weight, PackedWeight)
        tensors = form.store(layer, weight)
        error = _loss(form, layer.prefix, tensors, weight)
        if error is None:
            repacked += 1
        else:
            losses.append(Loss(layer.prefix, error))
        parts.add(tensors)
    parts.flush()
    names = safetensors.join(parts.paths, out)
    shutil.rmtree(parts.folder)
    _beside(model, form, out)
    progress(stage, len(model.packed), len(model.packed))
    size = sum((out / file).stat().st_size for file in names if file.endswith(".safetensors"))
    notes = form.notes
    if dropped:
        notes += ("The cache's static scales, which are compressed-tensors' own, are left out.",)
    return Exported(name, size, repacked, tuple(losses), notes)


def copy(name: str, model: Model, out: Path, progress: Progress, notes: tuple[str, ...] = ()) -> Exported:
    """The export of a model that is in this form already: the same tensors."""
    checkpoint = model.checkpoint
    progress(f"export {name}", 0, 1)
    for file in (*checkpoint.shards.files, checkpoint.path / safetensors.INDEX):
        if file.is_file():
            files.copy_synced(file, out / file.name)
    quantization = checkpoint.quantization
    assert quantization is not None
    _beside(model, Form(quantization, lambda *_: {}), out)
    progress(f"export {name}", 1, 1)
    return Exported(name, checkpoint.bytes_on_disk(), len(model.packed), (), notes)


def dense(layer: Facts, weight: PackedWeight, model: Model) -> dict[str, Tensor]:
    """A layer that a form has no place for, in the model's own type."""
    tensors = {f"{layer.prefix}.weight": formats.dequantize(weight).to(model.dtype)}
    if weight.bias is not None:
        tensors[f"{layer.prefix}.bias"] = as_stored(f"{layer.prefix}.bias", weight.bias, model.dtype)
    return tensors


def _of_layers(model: Model) -> set[str]:
    """Names of all tensors of packed layers."""
    packed = {layer.prefix for layer in model.packed}
    return {
        name
        for name in model.checkpoint.names()
        # A linear layer has nothing below it but its own tensors, whose names have a dot or two more.
        if any(name.rsplit(".", dots)[0] in packed for dots in (1, 2, 3))
    }


def _loss(form: Form, prefix: str, tensors: Mapping[str, Tensor], weight: PackedWeight) -> float | None:
    """‖W' − W‖ / ‖W‖ of what a reader makes of the tensors; None where it is the same weight."""
    back = formats.read(form.quantization, tensors, prefix)
    before = formats.dequantize(weight)
    after = formats.dequantize(back) if isinstance(back, PackedWeight) else back.float()
    if before.equal(after):
        return None
    return relative_error(before, after)


def _beside(model: Model, form: Form, out: Path) -> None:
    """config.json, tokenizer, licence, and our cache's factors."""
    source = model.checkpoint.path
    directory.write_config(source, out, form.quantization)
    directory.copy_companions(source, out)
    if (source / scheme.TENSORS).is_file():
        (out / scheme.TENSORS).parent.mkdir(exist_ok=True)
        files.copy_synced(source / scheme.TENSORS, out / scheme.TENSORS)
