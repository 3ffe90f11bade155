"""Faults as quantisers and copies make them, planted in small sound models of every form."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.export import silent
from compress.export.gguf.file import write as write_gguf
from runtime import formats
from runtime.checkpoints.gguf.reader import read_header
from runtime.checkpoints.open import open_checkpoint
from runtime.formats import awq, gptq, int4, llm_int8
from runtime.formats.packed import PackedWeight
from tests.compress.packed_models import write_packed

Tensors = dict[str, Tensor]
GROUP = 16
# A block's layers that the faults are planted in; the first is of odd sizes, the last two of one shape.
Q, K, UP, GATE = (
    f"model.layers.1.{name}" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.gate_proj")
)
OTHER = "model.layers.0.mlp.up_proj"


@dataclass(frozen=True)
class Planted:
    """Words of which the findings have to hold every one, and the place that has to be named."""

    place: str
    words: tuple[str, ...] = ()


def write(source: Path, out: Path, form: str) -> Path:
    """The model at `source` packed soundly; returns the directory, or the GGUF file."""
    if form == "plain":
        shutil.copytree(source, out)
        return out
    if form in ("fp8", "int4", "int4-asymmetric", "int8", "nf4", "ternary", "ternary-1.25"):
        return write_packed(source, out, form)
    if form == "gguf":
        out.mkdir()
        write_packed(source, out / "packed", "int4-asymmetric")
        (out / "gguf").mkdir()
        write_gguf(out / "packed", out / "gguf", silent)
        return next((out / "gguf").glob("*.gguf"))
    return _write_words(source, out, form)


def _write_words(source: Path, out: Path, form: str) -> Path:
    """GPTQ in activation order, AWQ, LLM.int8."""
    checkpoint, tensors = open_checkpoint(source), {}
    for name in checkpoint.names():
        weight, prefix = checkpoint.tensor(name), name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.clone()
        elif form == "llm_int8":
            tensors |= _int8(weight, prefix)
        elif form == "awq":
            tensors |= awq.to_tensors(int4.pack(weight, GROUP, symmetric=False, scale_dtype=torch.float16), prefix)
        else:
            tensors |= gptq.to_tensors(_ordered(weight), prefix, layout="gptq_v2")
    config: dict[str, Any] = {
        "gptq": gptq.hf_config(4, GROUP, symmetric=False, reordered=True, layout="gptq_v2"),
        "awq": awq.hf_config(GROUP),
        "llm_int8": llm_int8.hf_config(["lm_head"]),
    }[form]
    shutil.copytree(source, out)
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(checkpoint.config | {"quantization_config": config}))
    return out


def _int8(weight: Tensor, prefix: str) -> Tensors:
    from runtime.formats import int8

    packed = int8.pack(weight, scale_dtype=torch.float32)
    absmax = (packed.scale.double() * 127).float()
    return llm_int8.to_tensors(PackedWeight(packed.scheme, packed.codes, absmax / 127.0), prefix)


def _ordered(weight: Tensor) -> PackedWeight:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5))
    order = order.view(-1, GROUP).sort(dim=1).values.flatten()
    packed = int4.pack(weight[:, order], GROUP, symmetric=False, scale_dtype=torch.float16)
    return PackedWeight(packed.scheme, packed.codes, packed.scale, packed.offset, order)


def change(folder: Path, how: Callable[[Tensors], Any]) -> None:
    """Changes the tensors of the one file."""
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, how: Callable[[dict[str, Any]], Any], name: str = "config.json") -> None:
    """Changes a JSON file."""
    config = json.loads((folder / name).read_text())
    how(config)
    (folder / name).write_text(json.dumps(config))


def swap(tensors: Tensors, one: str, other: str) -> None:
    tensors[one], tensors[other] = tensors[other], tensors[one]


def put(tensors: Tensors, name: str, how: Callable[[Tensor], Tensor]) -> None:
    tensors[name] = how(tensors[name].clone())


def nibbles(words: Tensor) -> Tensor:
    """Both halves of each byte exchanged."""
    octets = words.contiguous().view(torch.uint8)
    return (octets >> 4 | octets << 4).view(words.dtype)


def add_to_nibbles(words: Tensor, step: int) -> Tensor:
    octets = words.contiguous().view(torch.uint8)
    low, high = (octets & 15).to(torch.int16) + step, (octets >> 4).to(torch.int16) + step
    return ((low & 15) | (high & 15) << 4).to(torch.uint8).view(words.dtype)


def with_nan(values: Tensor) -> Tensor:
    values.view(-1)[3] = float("nan")
    return values


def change_bytes(file: Path, tensor: str, how: Callable[[bytearray], bytes | bytearray]) -> None:
    """Changes the bytes of one tensor of a GGUF file."""
    entry = read_header(file).tensors[tensor]
    data = bytearray(file.read_bytes())
    data[entry.start : entry.start + entry.size] = how(data[entry.start : entry.start + entry.size])
    file.write_bytes(data)


def _of(file: Path, tensor: str) -> bytes:
    entry = read_header(file).tensors[tensor]
    return file.read_bytes()[entry.start : entry.start + entry.size]


def swap_blocks(file: Path) -> None:
    one, other = _of(file, "blk.0.ffn_up.weight"), _of(file, "blk.1.ffn_up.weight")
    change_bytes(file, "blk.0.ffn_up.weight", lambda _: bytearray(other))
    change_bytes(file, "blk.1.ffn_up.weight", lambda _: bytearray(one))


def rotary_neighbours(data: bytearray) -> bytes:
    """Rows of two heads of 16 in the layout in which halves rotate together."""
    rows = torch.frombuffer(data, dtype=torch.uint8).view(2, 8, 2, -1)
    return bytes(rows.transpose(1, 2).contiguous().flatten().tolist())


def block_nibbles(data: bytearray) -> bytes:
    """Q4_1: 4 bytes of scale and minimum, 16 of codes."""
    blocks = torch.frombuffer(data, dtype=torch.uint8).view(-1, 20).clone()
    blocks[:, 4:] = blocks[:, 4:] >> 4 | blocks[:, 4:] << 4
    return bytes(blocks.flatten().tolist())


def block_nan(data: bytearray) -> bytearray:
    data[0:2] = b"\x00\x7e"
    return data


def rename_tensor(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))


def unwoven(words: Tensor) -> Tensor:
    """AWQ's words as if their nibbles held columns one after the other."""
    from runtime.formats.codes import pack_words

    return pack_words(awq._unpack(words), 4)


def cut_short(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 2 // 3])


def leave_plain(folder: Path, layer: str) -> None:
    packed = open_checkpoint(folder).weight(layer)
    assert isinstance(packed, PackedWeight)

    def how(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(f"{layer}.")]:
            del tensors[name]
        tensors[f"{layer}.weight"] = formats.dequantize(packed)

    change(folder, how)


def other_angle(config: dict[str, Any]) -> None:
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}


def in_shards(folder: Path, fault: Callable[[list[Path]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    files = [folder / f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for file, half in zip(files, halves, strict=True):
        save_file({name: tensors[name] for name in half}, file, metadata={"format": "pt"})
    places = {name: file.name for file, half in zip(files, halves, strict=True) for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "model.safetensors").unlink()
    fault(files)


def move_tokens(folder: Path) -> None:
    def how(tokenizer: dict[str, Any]) -> None:
        words = tokenizer["model"]["vocab"]
        one, other = list(words)[40:42]
        words[one], words[other] = words[other], words[one]

    configure(folder, how, "tokenizer.json")
