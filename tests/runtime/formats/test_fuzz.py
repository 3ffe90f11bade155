"""Damaged files of every format that is read: one sentence or a weight, never a crash or a bill of gigabytes.

A few hundred mutations here, 10,000 of each format with `-m slow`.
"""

import json
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from runtime import formats
from runtime.checkpoints.open import open_checkpoint
from runtime.errors import UserError
from runtime.formats import awq, gptq, int4, int8, llm_int8, nf4, ternary
from runtime.formats.packed import PackedWeight
from tests.mutations import JUNK, mutated_value

Made = tuple[dict[str, Tensor], dict[str, Any]]
PREFIX = "model.layers.0.self_attn.q_proj"
N, K = 32, 128
# What a layer of this size may take once it is read: codes, scales and order, with room to spare.
_MOST_BYTES = 64 * N * K


def weights(seed: int = 0) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.05


def _int4(bits: int, symmetric: bool, order: bool = False) -> PackedWeight:
    packed = int4.pack(weights(), 32, bits=bits, symmetric=symmetric, scale_dtype=torch.float16, bias=torch.ones(N))
    return replace(packed, perm=torch.randperm(K, generator=torch.Generator().manual_seed(1))) if order else packed


def make(kind: str) -> Made:
    """A layer's tensors and `quantization_config`."""
    if kind.startswith("gptq"):
        order = kind == "gptq order"
        packed = _int4(3 if order else 4, not order, order)
        layout = "gptq_v2" if order else "gptq"
        config = gptq.hf_config(packed.scheme.bits, 32, symmetric=not order, reordered=order, layout=layout)  # type: ignore[arg-type]
        return gptq.to_tensors(packed, PREFIX, layout=layout), config  # type: ignore[arg-type]
    if kind == "awq":
        return awq.to_tensors(_int4(4, False), PREFIX), awq.hf_config(32, ["lm_head"])
    if kind == "llm.int8":
        return llm_int8.to_tensors(int8.pack(weights(), bias=torch.ones(N)), PREFIX), llm_int8.hf_config(["lm_head"])
    if kind.startswith("nf4"):
        double = kind == "nf4 double"
        return nf4.to_tensors(nf4.pack(weights(), double_quant=double), PREFIX), nf4.hf_config(double_quant=double)
    if kind == "bitnet":
        return ternary.to_tensors(ternary.pack(weights()), PREFIX), ternary.hf_config(["lm_head"])
    if kind == "int-quantized":
        packed = int8.pack(weights(), input_scale=0.02)
        return int8.to_tensors(packed, PREFIX), formats.hf_config({PREFIX: packed.scheme}, ["lm_head"])
    packed = _int4(4, False, order=True)
    stored = int4.to_tensors(packed, PREFIX, scale_dtype=torch.float16)
    return stored, formats.hf_config({PREFIX: packed.scheme}, ["lm_head"], reordered=[PREFIX])


KINDS = ("gptq", "gptq order", "awq", "llm.int8", "nf4", "nf4 double", "bitnet", "int-quantized", "pack-quantized")
_DTYPES = (torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)


def mutate_tensors(chance: random.Random, tensors: dict[str, Tensor]) -> None:
    """One change to one tensor: gone, of another type or shape, or with other values."""
    name = chance.choice(sorted(tensors))
    tensor = tensors[name].clone()
    way = chance.randrange(7)
    if way == 0:
        del tensors[name]
        return
    if way == 1:
        tensor = tensor.to(chance.choice(_DTYPES))
    elif way == 2:
        tensor = tensor.flatten()[: chance.randrange(tensor.numel() + 1)]
    elif way == 3:
        tensor = tensor.reshape(chance.choice([(1, -1), (-1, 1), (-1,), (1, 1, -1)]))
    elif way == 4 and tensor.ndim == 2:
        tensor = tensor.t().contiguous()
    elif way == 5:
        tensor = torch.cat([tensor.flatten(), tensor.flatten()]).reshape(-1, *tensor.shape[1:])
    elif tensor.numel():
        raw = tensor.flatten().view(torch.uint8) if tensor.numel() else tensor
        for _ in range(chance.randrange(1, 9)):
            raw[chance.randrange(raw.numel())] = chance.choice([0, 1, 127, 128, 255, chance.randrange(256)])
        tensor = raw.view(tensor.dtype).view(tensor.shape)
    tensors[name] = tensor.contiguous()


def mutate_file(chance: random.Random, data: bytes) -> bytes:
    """The file cut, or with a header that lies about shapes, types and offsets, or with bytes of it changed."""
    way = chance.randrange(3)
    if way == 0:
        return data[: chance.randrange(len(data))]
    (length,) = struct.unpack("<Q", data[:8])
    if way == 1:
        changed = bytearray(data)
        for _ in range(chance.randrange(1, 5)):
            changed[chance.randrange(8 + length)] = chance.randrange(256)
        return bytes(changed)
    header = json.loads(data[8 : 8 + length])
    about = header[chance.choice(sorted(set(header) - {"__metadata__"}))]
    lie = chance.choice([0, 1, -1, 2**31, 2**62, chance.randrange(1, 5000)])
    part = chance.choice(["shape", "data_offsets", "dtype"])
    if part == "dtype":
        about["dtype"] = chance.choice(["F64", "I8", "U8", "BF16", "X9", "F8_E4M3"])
    elif about[part]:
        about[part][chance.randrange(len(about[part]))] = lie
    else:
        about[part] = [lie]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def mutations(chance: random.Random, kind: str) -> Iterator[tuple[bytes, Any]]:
    """Endless pairs of a weight file and a configuration, something wrong with one of them."""
    while True:
        tensors, config = make(kind)
        config = json.loads(json.dumps(config))
        data = save(tensors)
        way = chance.randrange(3)
        if way == 0:
            config = mutated_value(chance, config, (*JUNK, ["lm_head"], {"weights": 4}))
        elif way == 1:
            mutate_tensors(chance, tensors)
            data = save(tensors)
        else:
            data = mutate_file(chance, data)
        yield data, config


def attempt(folder: Path, data: bytes, config: Any) -> PackedWeight | Tensor | UserError:
    """What comes of reading the layer out of such a directory; anything but a UserError goes through."""
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    try:
        return open_checkpoint(folder).weight(PREFIX)
    except UserError as error:
        return error


def check(found: PackedWeight | Tensor | UserError) -> None:
    if isinstance(found, UserError):
        assert "\n" not in str(found) and len(str(found)) < 1000
    elif isinstance(found, PackedWeight):
        parts = (found.codes, found.scale, found.offset, found.perm, found.bias)
        assert sum(part.nbytes for part in parts if part is not None) < _MOST_BYTES
        assert torch.isfinite(found.scale).all()


def fuzz(kind: str, folder: Path, count: int, seed: int) -> int:
    """Tries so many mutations; returns how many were refused."""
    refused = 0
    for number, (data, config) in zip(range(count), mutations(random.Random(seed), kind), strict=False):
        try:
            found = attempt(folder, data, config)
        except Exception as error:
            raise AssertionError(f"{kind}, mutation {number} of seed {seed}: {error!r}") from error
        check(found)
        refused += isinstance(found, UserError)
    return refused


@pytest.mark.parametrize("kind", KINDS)
def test_some_hundred_mutations(kind: str, tmp_path: Path) -> None:
    tensors, config = make(kind)
    save_file(tensors, tmp_path / "model.safetensors")
    whole = attempt(tmp_path, save(tensors), config)
    assert isinstance(whole, PackedWeight) and whole.shape == (N, K)
    assert 60 < fuzz(kind, tmp_path, 150, seed=0) < 150


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_at_every_tenth_byte(kind: str, tmp_path: Path) -> None:
    tensors, config = make(kind)
    data = save(tensors)
    for end in range(0, len(data), max(10, len(data) // 60 // 10 * 10)):
        assert isinstance(attempt(tmp_path, data[:end], config), UserError)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_mutations(kind: str, tmp_path: Path) -> None:
    assert fuzz(kind, tmp_path, 10_000, seed=1) > 4000


def test_methods_that_nobody_knows(tmp_path: Path) -> None:
    tensors, _ = make("gptq")
    for method in ("exl3", "hqq", 4, ["gptq"], "", "GPTQ"):
        found = attempt(tmp_path, save(tensors), {"quant_method": method, "bits": 4})
        assert isinstance(found, UserError) and "quant" in str(found)
