"""`gguf`: one file for llama.cpp and what is built on it, with tokenizer, chat template and rotary factors.

Codes are repacked (blocks.py); rows of queries and keys go into llama.cpp's order (checkpoints/gguf/names.py).
K-quants are read and not written: the gguf package does not quantise to them, and no grid of ours is theirs.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compress.artifact.files import sync
from compress.errors import UserError
from compress.export import Exported, Loss, Progress
from compress.export.gguf import metadata
from compress.export.gguf import tokenizer as tokenizers
from compress.export.gguf.blocks import choose, loss, pack
from runtime.checkpoints.architecture import Architecture
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.gguf.names import ROPE_FACTORS, Place, rows_there, to_gguf
from runtime.checkpoints.gguf.reader import BF16, F16, F32, BlockType
from runtime.checkpoints.open import open_checkpoint
from runtime.formats.packed import PackedWeight

if TYPE_CHECKING:
    from gguf import GGUFWriter

_EMBEDDING = "model.embed_tokens"
Weight = PackedWeight | Tensor


@dataclass(frozen=True)
class Part:
    """A tensor of the file: `names` are transformers' tensors, one, or one for each expert of a stack."""

    place: Place
    names: tuple[str, ...]
    linear: bool


def parts(checkpoint: Checkpoint, kind: str, a: Architecture) -> Iterator[Part]:
    """What the file is to hold, in llama.cpp's usual order. Raises UserError for a tensor that has no name there."""
    names = frozenset(checkpoint.names())
    yield _part([f"{_EMBEDDING}.weight"], kind, linear=False)
    if not a.tied:
        yield _part(["lm_head.weight"], kind)
    yield _part(["model.norm.weight"], kind, linear=False)
    for number in range(a.layers):
        prefix = f"model.layers.{number}"
        vectors = ["input_layernorm", "post_attention_layernorm"]
        vectors += ["self_attn.q_norm", "self_attn.k_norm"] if a.query_key_norm else []
        for vector in vectors:
            yield _part([f"{prefix}.{vector}.weight"], kind, linear=False)
        layers = ["self_attn.qkv_proj"] if a.fused else [f"self_attn.{part}_proj" for part in "qkv"]
        layers.append("self_attn.o_proj")
        if a.experts is None:
            layers += ["mlp.gate_up_proj"] if a.fused else ["mlp.gate_proj", "mlp.up_proj"]
            layers.append("mlp.down_proj")
        for layer in layers:
            yield _part([f"{prefix}.{layer}.weight"], kind)
            if f"{prefix}.{layer}.bias" in names:
                yield _part([f"{prefix}.{layer}.bias"], kind, linear=False)
        if a.experts is not None:
            yield from _mixture(names, prefix, kind, a)


def _mixture(names: frozenset[str], prefix: str, kind: str, a: Architecture) -> Iterator[Part]:
    assert a.experts is not None
    base = next((f"{prefix}.{name}" for name in a.experts.names if f"{prefix}.{name}.gate.weight" in names), None)
    if base is None:
        raise UserError(f"{prefix}.mlp.gate.weight: expected a layer that chooses experts, found none")
    yield _part([f"{base}.gate.weight"], kind, linear=False)
    first = f"{base}.experts.0"
    old = any(name.startswith(f"{first}.w1.") for name in names)
    for part in ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj"):
        yield _part([f"{base}.experts.{index}.{part}.weight" for index in range(a.experts.count)], kind)


def _part(names: list[str], kind: str, linear: bool = True) -> Part:
    place = to_gguf(names[0], kind)
    assert place is not None, f"{names[0]} has no name in GGUF"
    return Part(place, tuple(names), linear)


def read(checkpoint: Checkpoint, name: str) -> Weight:
    """A tensor of the checkpoint: packed or plain, also out of experts that are fused in one tensor."""
    prefix, _, part = name.rpartition(".")
    if part == "bias":
        # A packed layer's is what it adds, which in some layouts is not what is stored.
        whole = checkpoint.weight(prefix)
        return whole.bias if isinstance(whole, PackedWeight) and whole.bias is not None else checkpoint.tensor(name)
    if name.endswith("norm.weight") or prefix == _EMBEDDING:
        return checkpoint.tensor(name)
    base, fused, rest = prefix.partition(".experts.")
    if fused and f"{base}.experts.gate_up_proj" in checkpoint.shards:
        index, _, layer = rest.partition(".")
        stack = checkpoint.tensor(f"{base}.experts.{'down_proj' if layer == 'down_proj' else 'gate_up_proj'}")
        if layer == "down_proj":
            return stack[int(index)]
        return stack[int(index)].chunk(2)[0 if layer == "gate_proj" else 1]
    return checkpoint.weight(prefix)


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
    from gguf import GGUFWriter

    checkpoint = open_checkpoint(model)
    shown = checkpoint.path.name
    if checkpoint.path.is_file():
        raise UserError(f"{shown}: expected a model directory to export, found a GGUF file: name the artifact")
    kind, a = metadata.architecture(shown, checkpoint.config)
    parameters, factors = metadata.rope(shown, checkpoint.config, a)
    vocabulary = tokenizers.read(checkpoint.path, a.vocab)
    held = list(parts(checkpoint, kind, a))
    plans = [_plan(checkpoint, part, _FLOATS.get(floats)) for part in held]
    kinds = [found for found, _ in plans]
    file = out / FILE
    writer = GGUFWriter(file, kind)
    try:
        called = metadata.name(a, () if vocabulary is None else vocabulary.tokens)
        metadata.add(writer, called, a, parameters)
        writer.add_file_type(_file_type(kinds))
        tokenizers.add(writer, checkpoint.path, vocabulary, checkpoint.config)
        _announce(writer, held, plans, factors)
        losses = _write(writer, checkpoint, a, held, kinds, progress)
        if factors is not None:
            writer.write_tensor_data(factors)
    finally:
        writer.close()
    with file.open("r+b") as opened:
        sync(opened)
    linear = {name.removesuffix(".weight") for part in held if part.linear for name in part.names}
    kept = linear - {entry.layer for entry in losses}
    notes = (*_notes(kinds, vocabulary, parameters, metadata.context(a)[1]), *_left_out(checkpoint))
    return Exported(NAME, file.stat().st_size, len(kept), tuple(losses), notes)


def refusal(kinds: frozenset[str]) -> str | None:
    """Why layers of these kinds cannot be exported; known before a run begins. Blocks hold every kind, or round it."""
    if find_spec("gguf") is None:
        return "expected the gguf package, found none: pip install 'specpress[gguf]'"
    return None


def _plan(checkpoint: Checkpoint, part: Part, plain: BlockType | None) -> tuple[BlockType, tuple[int, ...]]:
    """Type and shape of a tensor of the file, by the first that goes into it."""
    weight = read(checkpoint, part.names[0])
    shape = tuple(weight.shape) if part.place.expert is None else (len(part.names), *weight.shape)
    if len(weight.shape) == 1 or part.place.tensor.endswith("ffn_gate_inp.weight"):
        return F32, shape
    return plain if plain is not None and isinstance(weight, Tensor) else choose(weight), shape


def _announce(
    writer: "GGUFWriter",
    held: list[Part],
    plans: list[tuple[BlockType, tuple[int, ...]]],
    factors: NDArray[np.float32] | None,
) -> None:
    """Writes the header: metadata, and where each tensor is going to be."""
    from gguf import GGMLQuantizationType

    for part, (kind, shape) in zip(held, plans, strict=True):
        size = int(np.prod(shape[:-1])) * kind.row_bytes(shape[-1])
        # float32 so that the shape is taken as it is: the package would read uint8's as bytes.
        number = GGMLQuantizationType(kind.number)
        writer.add_tensor_info(part.place.tensor, shape, np.dtype(np.float32), size, raw_dtype=number)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _write(
    writer: "GGUFWriter",
    checkpoint: Checkpoint,
    a: Architecture,
    held: list[Part],
    kinds: list[BlockType],
    progress: Progress,
) -> list[Loss]:
    """Streams the tensors, one in memory at a time; says what was rounded."""
    losses: list[Loss] = []
    for done, (part, kind) in enumerate(zip(held, kinds, strict=True)):
        progress(f"export {NAME}", done, len(held))
        rows = []
        for name in part.names:
            packed, error = _rows(checkpoint, a, part.place, name, kind)
            rows.append(packed)
            if error:
                losses.append(Loss(name.removesuffix(".weight"), error))
        writer.write_tensor_data(rows[0] if len(rows) == 1 else np.stack(rows))
    progress(f"export {NAME}", len(held), len(held))
    return losses


def _rows(
    checkpoint: Checkpoint, a: Architecture, place: Place, name: str, kind: BlockType
) -> tuple[NDArray[np.uint8], float]:
    """A tensor's bytes, (N, bytes of a row), rows in llama.cpp's order, and what rounding cost."""
    weight = read(checkpoint, name)
    vector = len(weight.shape) == 1
    if vector and isinstance(weight, Tensor):
        weight = (weight.float() + (1.0 if place.plus_one else 0.0)).unsqueeze(1)
    if isinstance(weight, PackedWeight):
        weight = replace(weight, bias=None)
        if not kind.plain and choose(weight) != kind:
            raise UserError(
                f"{name}: expected the scheme of this layer's other experts, as llama.cpp has it, found"
                f" {weight.scheme.kind}: give them one scheme in the recipe"
            )
    packed = pack(name, weight, kind)
    error = loss(weight, packed, kind)
    if place.rotated is not None:
        packed = packed[rows_there(packed.shape[0], a.heads if place.rotated == "query" else a.kv_heads)]
    return np.ascontiguousarray(packed.reshape(-1) if vector else packed), error


def _file_type(kinds: list[BlockType]) -> int:
    """llama.cpp's number for the type that most matrices have."""
    from gguf import LlamaFileType

    quantised = Counter(kind.name for kind in kinds if not kind.plain)
    half = F16 if F16 in kinds else BF16 if BF16 in kinds else None
    if not quantised:
        return int(LlamaFileType.ALL_F32 if half is None else LlamaFileType[f"MOSTLY_{half.name}"])
    return int(LlamaFileType[f"MOSTLY_{quantised.most_common(1)[0][0]}"])


def _notes(
    kinds: list[BlockType], vocabulary: Any, parameters: dict[str, Any], windowed: str | None
) -> tuple[str, ...]:
    counted = Counter(kind.name for kind in kinds).most_common()
    notes = ["tensors: " + ", ".join(f"{count} {kind}" for kind, count in counted)]
    if windowed is not None:
        notes.append(windowed)
    if vocabulary is None:
        notes.append("there is no tokenizer.json beside the weights, so the file has no tokenizer")
    if not metadata.reads_back(parameters):
        notes.append("the rotary factors are not those of Llama 3's releases: llama.cpp reads them, Specpress does not")
    return tuple(notes)


def _left_out(checkpoint: Checkpoint) -> list[str]:
    """What the artifact has that a GGUF file has no place for."""
    notes = []
    if any(name.endswith(".input_scale") for name in checkpoint.names()):
        notes.append("the static input scales are left out: llama.cpp rounds inputs block by block")
    if "kv_cache" in checkpoint.config.get("specpress", {}):
        notes.append("the cache's scheme is left out: llama.cpp has its own, --cache-type-k and --cache-type-v")
    return notes


__all__ = ["FILE", "NAME", "refusal", "write"]
