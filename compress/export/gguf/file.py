"""`gguf`: one file for llama.cpp and what is built on it, with tokenizer, chat template and rotary factors.

Codes are repacked (blocks.py); rows of queries and keys go into llama.cpp's order (checkpoints/gguf/names.py).
K-quants are read and not written: the gguf package does not quantise to them, and no grid of ours is theirs.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compress.artifact.files import sync
from compress.errors import UserError
from compress.export import Exported, Loss, Progress, check_kinds, told
from compress.export.gguf import metadata
from compress.export.gguf import tokenizer as tokenizers
from compress.export.gguf.blocks import choose, loss, pack
from compress.export.layers import weight_of
from runtime.checkpoints.architecture import Architecture
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.gguf.names import ROPE_FACTORS, Place, rows_there, to_gguf
from runtime.checkpoints.gguf.reader import BF16, F16, F32, BlockType
from runtime.checkpoints.open import open_checkpoint
from runtime.formats.packed import PackedWeight

_EMBEDDING = "model.embed_tokens"
Weight = PackedWeight | Tensor


@dataclass(frozen=True)
class Part:
    """A tensor of the file: `names` are transformers' tensors, one, or one for each expert of a stack."""

    place: Place
    names: tuple[str, ...]
    kind: BlockType
    shape: tuple[int, ...]

    @property
    def linear(self) -> bool:
        """Whether it is the weight of linear layers, and of those that may be packed."""
        return len(self.shape) > 1 and not self.place.tensor.endswith(("ffn_gate_inp.weight", "token_embd.weight"))


def tensors(names: Collection[str], a: Architecture) -> Iterator[tuple[str, ...]]:
    """transformers' names of what the file is to hold, in llama.cpp's usual order; of experts all of a stack.

    Raises UserError for a layer that chooses experts by a tensor of another name than is known.
    """
    yield (f"{_EMBEDDING}.weight",)
    if not a.tied:
        yield ("lm_head.weight",)
    yield ("model.norm.weight",)
    for number in range(a.layers):
        prefix = f"model.layers.{number}"
        layers = ["input_layernorm", "post_attention_layernorm"]
        layers += ["self_attn.q_norm", "self_attn.k_norm"] if a.query_key_norm else []
        layers += ["self_attn.qkv_proj"] if a.fused else [f"self_attn.{part}_proj" for part in "qkv"]
        layers.append("self_attn.o_proj")
        if a.experts is None:
            layers += ["mlp.gate_up_proj"] if a.fused else ["mlp.gate_proj", "mlp.up_proj"]
            layers.append("mlp.down_proj")
        for layer in layers:
            yield (f"{prefix}.{layer}.weight",)
            if f"{prefix}.{layer}.bias" in names:
                yield (f"{prefix}.{layer}.bias",)
        if a.experts is None:
            continue
        base = next((f"{prefix}.{name}" for name in a.experts.names if f"{prefix}.{name}.gate.weight" in names), None)
        if base is None:
            raise UserError(f"{prefix}.mlp.gate.weight: expected a layer that chooses experts, found none")
        yield (f"{base}.gate.weight",)
        old = any(name.startswith(f"{base}.experts.0.w1.") for name in names)
        for part in ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj"):
            yield tuple(f"{base}.experts.{index}.{part}.weight" for index in range(a.experts.count))


def _part(checkpoint: Checkpoint, names: tuple[str, ...], architecture: str, floats: BlockType | None) -> Part:
    """Where tensors go, and type and shape of what they become, by the first of them."""
    place = to_gguf(names[0], architecture)
    assert place is not None, f"{names[0]} has no name in GGUF"
    weight = read(checkpoint, names[0])
    if isinstance(weight, PackedWeight):
        check_kinds(["gguf"], {weight.scheme.kind})
    shape = tuple(weight.shape) if place.expert is None else (len(names), *weight.shape)
    kind = floats if floats is not None and isinstance(weight, Tensor) else choose(weight)
    in_floats = len(weight.shape) == 1 or place.tensor.endswith("ffn_gate_inp.weight")
    return Part(place, names, F32 if in_floats else kind, shape)


def read(checkpoint: Checkpoint, name: str) -> Weight:
    """A tensor of the checkpoint: packed or plain, also out of experts that are fused in one tensor."""
    prefix, _, part = name.rpartition(".")
    if part == "bias":
        # A packed layer's is what it adds, which in some layouts is not what is stored.
        whole = weight_of(checkpoint, prefix)
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
    return weight_of(checkpoint, prefix)


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
    kind, a = metadata.architecture(shown, checkpoint.config)
    parameters, factors = metadata.rope(shown, checkpoint.config, a)
    vocabulary = tokenizers.read(checkpoint.path, a.vocab)
    wanted = tensors(frozenset(checkpoint.names()), a)
    parts = [_part(checkpoint, names, kind, _FLOATS.get(floats)) for names in wanted]
    losses: list[Loss] = []
    file = out / FILE
    writer = GGUFWriter(file, kind)
    try:
        called = metadata.name(a, () if vocabulary is None else vocabulary.tokens)
        metadata.add(writer, called, a, parameters)
        writer.add_file_type(_file_type(parts))
        tokenizers.add(writer, checkpoint.path, vocabulary, checkpoint.config)
        for part in parts:
            size = int(np.prod(part.shape[:-1])) * part.kind.row_bytes(part.shape[-1])
            # float32 so that the shape is taken as it is: the package would read uint8's as bytes.
            number = GGMLQuantizationType(part.kind.number)
            writer.add_tensor_info(part.place.tensor, part.shape, np.dtype(np.float32), size, raw_dtype=number)
        if factors is not None:
            writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, part in enumerate(parts):
            progress(f"export {NAME}", done, len(parts))
            rows = [_rows(checkpoint, a, part, name, losses) for name in part.names]
            writer.write_tensor_data(rows[0] if len(rows) == 1 else np.stack(rows))
        progress(f"export {NAME}", len(parts), len(parts))
        if factors is not None:
            writer.write_tensor_data(factors)
    finally:
        writer.close()
    with file.open("r+b") as opened:
        sync(opened)
    linear = {name.removesuffix(".weight") for part in parts if part.linear for name in part.names}
    kept = linear - {entry.layer for entry in losses}
    counted = Counter(part.kind.name for part in parts).most_common()
    notes = told(
        "tensors: " + ", ".join(f"{count} {kind}" for kind, count in counted),
        metadata.context(a)[1],
        vocabulary is None and "there is no tokenizer.json beside the weights, so the file has no tokenizer",
        not metadata.reads_back(parameters)
        and "the rotary factors are not those of Llama 3's releases: llama.cpp reads them, Specpress does not",
        any(name.endswith(".input_scale") for name in checkpoint.names())
        and "the static input scales are left out: llama.cpp rounds inputs block by block",
        "kv_cache" in checkpoint.config.get("specpress", {})
        and "the cache's scheme is left out: llama.cpp has its own, --cache-type-k and --cache-type-v",
    )
    return Exported(NAME, file.stat().st_size, len(kept), tuple(losses), notes)


def refusal(kinds: frozenset[str]) -> str | None:
    """Why layers of these kinds cannot be exported; known before a run begins. Blocks hold every kind, or round it."""
    if find_spec("gguf") is None:
        return "expected the gguf package, found none: pip install 'specpress[gguf]'"
    return None


def _rows(checkpoint: Checkpoint, a: Architecture, part: Part, name: str, losses: list[Loss]) -> NDArray[Any]:
    """A tensor's bytes, (N, bytes of a row), rows in llama.cpp's order; what rounding cost is added to `losses`."""
    weight, place, kind = read(checkpoint, name), part.place, part.kind
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
    if error := loss(weight, packed, kind):
        losses.append(Loss(name.removesuffix(".weight"), error))
    if place.rotated is not None:
        packed = packed[rows_there(packed.shape[0], a.heads if place.rotated == "query" else a.kv_heads)]
    return np.ascontiguousarray(packed.reshape(-1) if vector else packed)


def _file_type(parts: list[Part]) -> int:
    """llama.cpp's number for the type that most matrices have."""
    from gguf import LlamaFileType

    kinds = [part.kind for part in parts]
    quantised = Counter(kind.name for kind in kinds if not kind.plain)
    half = F16 if F16 in kinds else BF16 if BF16 in kinds else None
    if not quantised:
        return int(LlamaFileType.ALL_F32 if half is None else LlamaFileType[f"MOSTLY_{half.name}"])
    return int(LlamaFileType[f"MOSTLY_{quantised.most_common(1)[0][0]}"])
