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
    if form in ("int4", "int4-asymmetric", "int8", "nf4", "ternary"):
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


def _bytes(file: Path, tensor: str, how: Callable[[bytearray], bytes | bytearray]) -> None:
    """Changes the bytes of one tensor of a GGUF file."""
    entry = read_header(file).tensors[tensor]
    data = bytearray(file.read_bytes())
    data[entry.start : entry.start + entry.size] = how(data[entry.start : entry.start + entry.size])
    file.write_bytes(data)


def _of(file: Path, tensor: str) -> bytes:
    entry = read_header(file).tensors[tensor]
    return file.read_bytes()[entry.start : entry.start + entry.size]


def _swap_blocks(file: Path) -> None:
    one, other = _of(file, "blk.0.ffn_up.weight"), _of(file, "blk.1.ffn_up.weight")
    _bytes(file, "blk.0.ffn_up.weight", lambda _: bytearray(other))
    _bytes(file, "blk.1.ffn_up.weight", lambda _: bytearray(one))


def _neighbours(data: bytearray) -> bytes:
    """Rows of two heads of 16 in the layout in which halves rotate together."""
    rows = torch.frombuffer(data, dtype=torch.uint8).view(2, 8, 2, -1)
    return bytes(rows.transpose(1, 2).contiguous().flatten().tolist())


def _block_nibbles(data: bytearray) -> bytes:
    """Q4_1: 4 bytes of scale and minimum, 16 of codes."""
    blocks = torch.frombuffer(data, dtype=torch.uint8).view(-1, 20).clone()
    blocks[:, 4:] = blocks[:, 4:] >> 4 | blocks[:, 4:] << 4
    return bytes(blocks.flatten().tolist())


def _block_nan(data: bytearray) -> bytearray:
    data[0:2] = b"\x00\x7e"
    return data


def _rename(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))


def _unwoven(words: Tensor) -> Tensor:
    """AWQ's words as if their nibbles held columns one after the other."""
    from runtime.formats.codes import pack_words

    return pack_words(awq._unpack(words), 4)


def _cut(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 2 // 3])


def _plain(folder: Path, layer: str) -> None:
    packed = open_checkpoint(folder).weight(layer)
    assert isinstance(packed, PackedWeight)

    def how(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(f"{layer}.")]:
            del tensors[name]
        tensors[f"{layer}.weight"] = formats.dequantize(packed)

    change(folder, how)


def _angle(config: dict[str, Any]) -> None:
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}


def _shards(folder: Path, fault: Callable[[list[Path]], Any]) -> None:
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


def _move_tokens(folder: Path) -> None:
    def how(tokenizer: dict[str, Any]) -> None:
        words = tokenizer["model"]["vocab"]
        one, other = list(words)[40:42]
        words[one], words[other] = words[other], words[one]

    configure(folder, how, "tokenizer.json")


Fault = tuple[str, str, Callable[[Path], Any], Planted]
FAULTS: tuple[Fault, ...] = (
    (
        "gptq",
        "zero points off by one",
        lambda f: change(f, lambda t: put(t, f"{UP}.qzeros", lambda z: add_to_nibbles(z, 1))),
        Planted(UP, ("zero points are lowered by 1",)),
    ),
    (
        "gptq",
        "layout says v1",
        lambda f: configure(f, lambda c: c["quantization_config"].update(checkpoint_format="gptq")),
        Planted("model.layers", ("zero points are lowered by 1",)),
    ),
    (
        "gptq",
        "order of inputs lost",
        lambda f: change(f, lambda t: put(t, f"{UP}.g_idx", lambda g: (torch.arange(g.numel()) // GROUP).to(g.dtype))),
        Planted(UP, ("activation order (g_idx) is lost",)),
    ),
    (
        "gptq",
        "nibbles swapped",
        lambda f: change(f, lambda t: put(t, f"{Q}.qweight", nibbles)),
        Planted(Q, ("nibbles",)),
    ),
    (
        "gptq",
        "scales swapped",
        lambda f: change(f, lambda t: swap(t, f"{UP}.scales", f"{OTHER}.scales")),
        Planted(UP, ("scales of", OTHER)),
    ),
    ("gptq", "NaN scale", lambda f: change(f, lambda t: put(t, f"{K}.scales", with_nan)), Planted(K, ("finite",))),
    (
        "gptq",
        "zero points transposed",
        lambda f: change(f, lambda t: put(t, f"{UP}.qzeros", lambda z: z.t().reshape(z.shape))),
        Planted(UP, ("zero points",)),
    ),
    (
        "gptq",
        "desc_act false",
        lambda f: configure(f, lambda c: c["quantization_config"].update(desc_act=False)),
        Planted("quantization_config.desc_act", ("g_idx",)),
    ),
    (
        "gptq",
        "bits of another",
        lambda f: configure(f, lambda c: c["quantization_config"].update(bits=8)),
        Planted("model.layers", ("8 bits",)),
    ),
    (
        "gptq",
        "two layers swapped",
        lambda f: change(
            f,
            lambda t: [swap(t, f"{UP}.{part}", f"{OTHER}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")],
        ),
        Planted(UP, ("holds what the original has as", OTHER)),
    ),
    (
        "awq",
        "order of outputs lost",
        lambda f: change(f, lambda t: put(t, f"{UP}.qweight", _unwoven)),
        Planted(UP, ("order of eight",)),
    ),
    (
        "awq",
        "scales transposed",
        lambda f: change(f, lambda t: put(t, f"{UP}.scales", lambda s: s.t().reshape(s.shape))),
        Planted(UP, ("scales",)),
    ),
    (
        "awq",
        "zero points off by one",
        lambda f: change(f, lambda t: put(t, f"{K}.qzeros", lambda z: add_to_nibbles(z, -1))),
        Planted(K, ("zero points are raised by 1",)),
    ),
    (
        "awq",
        "flag of zero points",
        lambda f: configure(f, lambda c: c["quantization_config"].update(zero_point=False)),
        Planted("quantization_config.zero_point", ("zero points",)),
    ),
    (
        "int4",
        "scales twice too large",
        lambda f: change(f, lambda t: put(t, f"{UP}.weight_scale", lambda s: s * 2)),
        Planted(UP, ("2 times what they should be",)),
    ),
    ("int4", "file cut short", lambda f: _cut(f / "model.safetensors"), Planted("model.safetensors", ("truncated",))),
    ("int4", "part missing", lambda f: change(f, lambda t: t.pop(f"{Q}.weight_scale")), Planted(Q, ("missing",))),
    (
        "int4",
        "group size of another",
        lambda f: configure(
            f, lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=64)
        ),
        Planted("model.layers", ("groups of 32", "groups of 64")),
    ),
    ("int4", "layer left plain", lambda f: _plain(f, Q), Planted(Q, ("stored plain",))),
    (
        "int4",
        "layer excepted and packed",
        lambda f: configure(f, lambda c: c["quantization_config"]["ignore"].append(K)),
        Planted(K, ("leaves this layer as it is",)),
    ),
    (
        "int4-asymmetric",
        "constant scales",
        lambda f: change(
            f, lambda t: put(t, f"{UP}.weight_scale", lambda s: torch.full_like(s, float(s.float().mean())))
        ),
        Planted(UP, ("scales are the same",)),
    ),
    (
        "int8",
        "rows off",
        lambda f: change(f, lambda t: put(t, f"{UP}.weight", lambda w: torch.cat([w[:50], w[50:55].flip(1), w[55:]]))),
        Planted(UP, ("5 of 192 rows",)),
    ),
    (
        "int8",
        "scales swapped",
        lambda f: change(f, lambda t: swap(t, f"{UP}.weight_scale", f"{OTHER}.weight_scale")),
        Planted(UP, ("scales of", OTHER)),
    ),
    (
        "nf4",
        "nibbles swapped",
        lambda f: change(f, lambda t: put(t, f"{UP}.weight", nibbles)),
        Planted(UP, ("nibbles",)),
    ),
    (
        "nf4",
        "absmax swapped",
        lambda f: change(
            f,
            lambda t: [
                swap(t, f"{UP}.weight.{p}", f"{OTHER}.weight.{p}")
                for p in ("absmax", "nested_absmax", "quant_state.bitsandbytes__nf4")
            ],
        ),
        Planted(UP, ("scales of", OTHER)),
    ),
    (
        "nf4",
        "bits of another",
        lambda f: configure(
            f,
            lambda c: c["quantization_config"].update(
                load_in_4bit=False, _load_in_4bit=False, load_in_8bit=True, _load_in_8bit=True
            ),
        ),
        Planted("quantization_config", ("8 bits",)),
    ),
    (
        "llm_int8",
        "norms swapped",
        lambda f: change(
            f, lambda t: swap(t, "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight")
        ),
        Planted("model.layers.0.input_layernorm.weight", ("model.layers.1.input_layernorm",)),
    ),
    (
        "llm_int8",
        "weight missing",
        lambda f: change(f, lambda t: t.pop("model.layers.1.post_attention_layernorm.weight")),
        Planted("model.layers.1.post_attention_layernorm.weight", ("missing",)),
    ),
    ("llm_int8", "angle of another", lambda f: configure(f, _angle), Planted("rope", ())),
    (
        "llm_int8",
        "heads of another",
        lambda f: configure(f, lambda c: c.update(num_attention_heads=8, num_key_value_heads=4, head_dim=8)),
        Planted("num_attention_heads", ("in the original 4",)),
    ),
    (
        "llm_int8",
        "fewer layers",
        lambda f: configure(f, lambda c: c.update(num_hidden_layers=1)),
        Planted("num_hidden_layers", ("further blocks",)),
    ),
    (
        "ternary",
        "scale too small",
        lambda f: change(f, lambda t: put(t, f"{UP}.weight_scale", lambda s: s * 3)),
        Planted(UP, ("times what they should be",)),
    ),
    ("gguf", "file cut short", _cut, Planted("model.gguf", ("cut short",))),
    ("gguf", "blocks swapped", _swap_blocks, Planted(UP, ("holds what the original has as", OTHER))),
    (
        "gguf",
        "rows of another layout",
        lambda f: _bytes(f, "blk.1.attn_k.weight", _neighbours),
        Planted(K, ("rotary layout",)),
    ),
    ("gguf", "nibbles swapped", lambda f: _bytes(f, "blk.1.ffn_up.weight", _block_nibbles), Planted(UP, ("nibbles",))),
    ("gguf", "scale is no number", lambda f: _bytes(f, "blk.1.ffn_up.weight", _block_nan), Planted(UP, ("finite",))),
    ("gguf", "tensor missing", _rename, Planted(UP, ("missing",))),
    (
        "plain",
        "head that is tied and differs",
        lambda f: change(f, lambda t: t.update({"lm_head.weight": torch.randn_like(t["model.embed_tokens.weight"])})),
        Planted("lm_head.weight", ("ties",)),
    ),
    (
        "plain",
        "transposed",
        lambda f: change(f, lambda t: put(t, f"{Q}.weight", lambda w: w.t())),
        Planted(Q, ("transposed",)),
    ),
    (
        "plain",
        "constant",
        lambda f: change(f, lambda t: put(t, f"{UP}.weight", torch.zeros_like)),
        Planted(UP, ("same",)),
    ),
    (
        "plain",
        "shape",
        lambda f: change(f, lambda t: put(t, f"{UP}.weight", lambda w: w[:100])),
        Planted(UP, ("shape",)),
    ),
    (
        "plain",
        "shard missing",
        lambda f: _shards(f, lambda files: files[1].unlink()),
        Planted("model-00002-of-00002.safetensors", ("missing",)),
    ),
    (
        "plain",
        "index of another",
        lambda f: _shards(
            f,
            lambda files: configure(
                f, lambda c: c["weight_map"].update({f"{UP}.weight": files[0].name}), "model.safetensors.index.json"
            ),
        ),
        Planted(UP, ("places it",)),
    ),
    ("plain", "tokens moved", lambda f: _move_tokens(f), Planted("tokenizer.json", ("other numbers",))),
    (
        "plain",
        "template of another",
        lambda f: (f / "chat_template.jinja").write_text("{{ messages[0].content }}"),
        Planted("chat_template", ()),
    ),
)
