"""`gguf`: one file for llama.cpp and what is built on it, with tokenizer, chat template and rotary factors.

Codes are repacked (blocks.py); rows of queries and keys go into llama.cpp's order (checkpoints/gguf/parts.py).
K-quants are read and not written: the gguf package does not quantise to them, and no grid of ours is theirs.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.artifact.files import sync
from compress.errors import UserError
from compress.export import Exported, Loss, Progress, check_kinds, told
from compress.export.gguf import metadata
from compress.export.gguf import tokenizer as tokenizers
from compress.export.gguf.blocks import choose, loss, pack
from compress.export.gguf.check import check
from compress.export.gguf.folding import Factor, factors, scaled
from compress.export.gguf.tensors import Tensors, Weight
from runtime.checkpoints.architecture import Architecture
from runtime.checkpoints.gguf.checkpoint import take_columns
from runtime.checkpoints.gguf.names import EMBEDDING, FORMS, LAYER_TABLE, architecture_of
from runtime.checkpoints.gguf.part import Part
from runtime.checkpoints.gguf.parts import numbers, parts
from runtime.checkpoints.gguf.reader import BF16, F16, F32, Q8_0, BlockType, TensorEntry
from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.rotation import rotation_of
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight
from runtime.model.tensor_reader import take_rows


@dataclass(frozen=True)
class Written:
    """A tensor of the file: its part, type and shape, and what it is multiplied by."""

    part: Part
    kind: BlockType
    shape: tuple[int, ...]
    factor: Factor

    @property
    def linear(self) -> bool:
        """Whether it is the weight of linear layers, and of those that may be packed."""
        return len(self.shape) > 1 and not self.part.vector and self.part.tensor not in (EMBEDDING, LAYER_TABLE)

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return int(np.prod(self.shape[:-1])) * self.kind.row_bytes(self.shape[-1])


def _tensors(tensors: Tensors, a: Architecture, kind: str) -> list[Part]:
    """The parts that the file is to hold, in llama.cpp's usual order.

    Raises UserError for biases that llama.cpp has no place for, and for ones that it wants and the model has not.
    """
    form, out = FORMS[kind], []
    for part in parts(a, form, tensors.names):
        layer = part.tensor.removesuffix(".bias").rpartition(".")[2] if part.bias else ""
        norm = layer.endswith("norm") or layer == "attn_norm_2"
        if part.bias and not tensors.has(part.names[0]):
            if layer in form.needed:
                raise UserError(f"{part.names[0]}: expected this bias, which llama.cpp wants for {kind}, found none")
            continue
        if part.bias and not norm and layer not in form.biases | {"attn_q", "attn_k", "attn_v", "attn_qkv"}:
            raise UserError(
                f"{part.names[0]}: expected no such bias, for which llama.cpp has no place in {kind}, found one: export"
                " it to another form"
            )
        out.append(part)
    return out


def _numbers(tensors: Tensors, a: Architecture) -> Iterator[tuple[str, list[float]]]:
    """The tensors that the file has as numbers in its metadata. Raises UserError where the checkpoint lacks one."""
    for one in numbers(a):
        usual = {} if one.default is None else {name: one.default for name in one.names if not tensors.has(name)}
        read = (usual[name] if name in usual else tensors.checkpoint.tensor(name).item() for name in one.names)
        yield one.key, [float(number) for number in read]


def _written(tensors: Tensors, part: Part, floats: BlockType | None, multiplied: dict[str, Factor]) -> Written:
    """Type and shape of what a part becomes, by the first of its tensors."""
    found = tensors.read(part.names[0])
    weight = _arranged(part, found)
    if isinstance(weight, PackedWeight) and weight.scheme.kind != "mxfp4":
        check_kinds([NAME], {weight.scheme.kind})
    shape = part.there or tuple(weight.shape)
    if part.heads > 1:
        shape = (part.heads, shape[0] // part.heads, shape[1])
    if isinstance(found, PackedWeight) and isinstance(weight, Tensor):
        kind = F32 if shape[-1] % Q8_0.weights else Q8_0
    else:
        kind = floats if floats is not None and isinstance(weight, Tensor) else choose(weight)
    kind = F32 if len(shape) == 1 or part.vector else kind
    own = part.tensor.split(".", 2)[-1] if part.tensor.startswith("blk.") else part.tensor
    return Written(part, kind, (len(part.names), *shape) if part.stacked else shape, multiplied.get(own, 1.0))


def _arranged(part: Part, weight: Weight) -> Weight:
    """A tensor of transformers' as its part has it: (N, K), or (N,) for a vector; rows in llama.cpp's order."""
    if part.rows is not None:
        weight = take_rows(weight, torch.from_numpy(part.rows))
    if part.columns is not None:
        return take_columns(weight, part.columns)
    if part.logarithm and isinstance(weight, Tensor):
        return -weight.float().exp()
    if part.turned == "heads":
        whole = dequantize(weight) if isinstance(weight, PackedWeight) else weight
        return whole.view(part.heads, -1, whole.shape[1]).transpose(1, 2).reshape(-1, whole.shape[0] // part.heads)
    if part.turned == "matrix" and isinstance(weight, Tensor):
        return weight.t().contiguous()
    if part.shape is not None and isinstance(weight, Tensor):
        return weight.squeeze(1) if weight.dim() == 3 else weight.view(-1)
    return weight


NAME, FILE = "gguf", "model.gguf"
Floats = Literal["keep", "f32", "f16"]
_FLOATS = {"f32": F32, "f16": F16}


def write(model: Path, out: Path, progress: Progress, *, floats: Floats = "keep") -> Exported:
    """Writes `out/model.gguf`: equal models give equal bytes, whatever their folders are called.

    floats  how plain matrices are stored: as they are, or all as one type. Vectors are float32 always, and so is what
            chooses experts: llama.cpp wants it so.

    Raises UserError without the gguf package, and for architectures, tokenizers and values that the format cannot hold.
    """
    if (why := refusal(frozenset())) is not None:
        raise UserError(f"export {NAME}: {why}")
    from gguf import GGMLQuantizationType, GGUFWriter

    checkpoint = open_checkpoint(model)
    shown = checkpoint.path.name
    if checkpoint.path.is_file():
        raise UserError(f"{shown}: expected a model directory to export, found a GGUF file: name the artifact")
    a, config = metadata.architecture(checkpoint)
    rotation = rotation_of(checkpoint.config)
    kind, values = architecture_of(a), metadata.as_values(config)
    parameters, rotary = metadata.rope(shown, config, a)
    found = metadata.keys(a, values, parameters)
    vocabulary = tokenizers.read(checkpoint.path, a.vocab)
    tensors = Tensors(checkpoint, a)
    multiplied = factors(a)
    written = [_written(tensors, part, _FLOATS.get(floats), multiplied) for part in _tensors(tensors, a, kind)]
    entries = {one.part.tensor: TensorEntry(one.part.tensor, one.kind, one.shape, 0, one.bytes) for one in written}
    said = check(shown, a, config, found, entries)
    losses: list[Loss] = []
    file = out / FILE
    writer = GGUFWriter(file, kind)
    try:
        for key, each in _numbers(tensors, a):
            writer.add_array(key, each)
        metadata.add(writer, metadata.name(a, () if vocabulary is None else vocabulary.tokens), found)
        metadata.add_rotation(writer, rotation)
        writer.add_file_type(_file_type(written))
        tokenizers.add(writer, checkpoint.path, vocabulary, checkpoint.config)
        for one in written:
            # float32 so that the shape is taken as it is: the package would read uint8's as bytes.
            number = GGMLQuantizationType(one.kind.number)
            writer.add_tensor_info(one.part.tensor, one.shape, np.dtype(np.float32), one.bytes, raw_dtype=number)
        for name, one_set in rotary.items():
            writer.add_tensor_info(name, one_set.shape, one_set.dtype, one_set.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, one in enumerate(written):
            progress(f"export {NAME}", done, len(written))
            rows = [_rows(tensors, one, name, losses) for name in one.part.names]
            writer.write_tensor_data(rows[0] if len(rows) == 1 else np.stack(rows))
        progress(f"export {NAME}", len(written), len(written))
        for one_set in rotary.values():
            writer.write_tensor_data(one_set)
    finally:
        writer.close()
    with file.open("r+b") as opened:
        sync(opened)
    linear = {name.removesuffix(".weight") for one in written if one.linear for name in one.part.names}
    kept = linear - {entry.layer for entry in losses}
    counted = Counter(one.kind.name for one in written).most_common()
    notes = told(
        "tensors: " + ", ".join(f"{count} {kind}" for kind, count in counted),
        metadata.context(a)[1],
        *said,
        vocabulary is None and "there is no tokenizer.json beside the weights, so the file has no tokenizer",
        not metadata.reads_back(parameters)
        and "the rotary factors are not those of Llama 3's releases: llama.cpp reads them, Specpress does not",
        any(name.endswith(".input_scale") for name in checkpoint.names())
        and "the static input scales are left out: llama.cpp rounds inputs block by block",
        "kv_cache" in checkpoint.config.get("specpress", {})
        and "the cache's scheme is left out: llama.cpp has its own, --cache-type-k and --cache-type-v",
        rotation is not None
        and "what is rotated stands in keys specpress.rotation.*; the norms as they were before stay in the run",
    )
    return Exported(NAME, file.stat().st_size, len(kept), tuple(losses), notes)


def refusal(kinds: frozenset[str]) -> str | None:
    """Why layers of these kinds cannot be exported; known before a run begins. Blocks hold every kind, or round it."""
    if find_spec("gguf") is None:
        return "expected the gguf package, found none: pip install 'specpress[gguf]'"
    return None


def _rows(tensors: Tensors, one: Written, name: str, losses: list[Loss]) -> NDArray[Any]:
    """A tensor's bytes, (N, bytes of a row), rows in llama.cpp's order; what rounding cost is added to `losses`."""
    weight, kind = scaled(_arranged(one.part, tensors.read(name)), one.factor), one.kind
    vector = len(weight.shape) == 1
    if isinstance(weight, Tensor) and one.part.vector:
        weight = weight.float() + one.part.offset
        weight = weight.unsqueeze(1) if vector else weight
    if isinstance(weight, PackedWeight):
        weight = replace(weight, bias=None)
        if not kind.plain and choose(weight) != kind:
            raise UserError(
                f"{name}: expected the scheme of this layer's other experts, as llama.cpp has it, found"
                f" {weight.scheme.kind}: give them one scheme in the recipe"
            )
    packed = pack(name, weight, kind)
    if error := loss(weight, packed, kind):
        losses.append(Loss(name.removesuffix(".weight"), error))
    return np.ascontiguousarray(packed.reshape(-1) if vector else packed)


_FILE_TYPES = {"MXFP4": "MXFP4_MOE"}


def _file_type(written: list[Written]) -> int:
    """llama.cpp's number for the type that most matrices have."""
    from gguf import LlamaFileType

    kinds = [one.kind for one in written]
    quantised = Counter(kind.name for kind in kinds if not kind.plain)
    half = F16 if F16 in kinds else BF16 if BF16 in kinds else None
    if not quantised:
        return int(LlamaFileType.ALL_F32 if half is None else LlamaFileType[f"MOSTLY_{half.name}"])
    most = quantised.most_common(1)[0][0]
    return int(LlamaFileType[f"MOSTLY_{_FILE_TYPES.get(most, most)}"])
