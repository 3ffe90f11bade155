"""bitsandbytes' LLM.int8: what the library wrote is read, and what we write transformers loads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import formats, load
from runtime.checkpoints.open import open_checkpoint
from runtime.errors import UserError
from runtime.formats import int8, llm_int8
from runtime.formats.packed import PackedWeight

functional = pytest.importorskip("bitsandbytes.functional")
Tiny = Callable[..., Path]
CONFIG = llm_int8.hf_config(["lm_head"])


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize(("n", "k"), [(1, 7), (13, 96), (64, 33)])
def test_the_librarys_bytes_are_read_to_its_weights(n: int, k: int) -> None:
    codes, absmax, _ = functional.int8_vectorwise_quant(weights(n, k).half())
    tensors = {"a.weight": codes, "a.SCB": absmax, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    packed = formats.read(CONFIG, tensors, "a")
    assert isinstance(packed, PackedWeight)
    # One factor here, two there: two units in the last place of float32.
    dense = functional.int8_vectorwise_dequant(codes, absmax)
    assert torch.allclose(formats.dequantize(packed), dense, rtol=2.5e-7, atol=0)
    again = llm_int8.to_tensors(packed, "a")
    assert torch.equal(again["a.weight"], codes)
    assert torch.allclose(again["a.SCB"], absmax, rtol=1.2e-7, atol=0)


def test_ours_is_read_back_exactly() -> None:
    packed = int8.pack(weights(12, 40), bias=torch.randn(12))
    back = formats.read(CONFIG, llm_int8.to_tensors(packed, "a", torch.float32), "a")
    assert isinstance(back, PackedWeight) and torch.equal(formats.dequantize(back), formats.dequantize(packed))
    assert torch.equal(back.bias, packed.bias)


def write_model(source: Path, out: Path) -> None:
    shutil.copytree(source, out)
    kept: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        prefix = name.removesuffix(".weight")
        packed = int8.pack(tensor) if name.endswith("_proj.weight") else None
        kept |= {name: tensor} if packed is None else llm_int8.to_tensors(packed, prefix)
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))


def test_transformers_loads_ours(tiny: Tiny, tmp_path: Path, text: Any, whole: Any, torch_threads: None) -> None:
    from transformers import AutoModelForCausalLM

    write_model(tiny("llama"), tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    seen = 0
    for name, module in model.named_modules():
        if f"{name}.SCB" in checkpoint.names():
            stats = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
            dense = functional.int8_vectorwise_dequant(module.weight.data, stats)
            assert torch.allclose(formats.dequantize(checkpoint.weight(name)), dense, rtol=2.5e-7, atol=0)
            seen += 1
    assert seen == 14
    tokens = text(40)
    with torch.no_grad():
        theirs = model(tokens.view(1, -1)).logits[0].float()
    ours = whole(load(tmp_path / "m", threads=1).decoder, tokens)
    # Both round inputs to 8 bits, by rules of their own.
    assert float((ours - theirs).norm() / theirs.norm()) < 0.03


def test_our_reader_takes_what_transformers_saves(tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(tiny("qwen2"), quantization_config=config, dtype=torch.float16)
    model.save_pretrained(tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    layers = [name.removesuffix(".SCB") for name in checkpoint.names() if name.endswith(".SCB")]
    assert len(layers) == 14
    original = load_file(tiny("qwen2") / "model.safetensors")
    for name in layers:
        packed = checkpoint.weight(name)
        assert isinstance(packed, PackedWeight)
        assert (packed.bias is not None) == (name.endswith(("q_proj", "k_proj", "v_proj")))
        error = (formats.dequantize(packed) - original[f"{name}.weight"]).abs()
        assert bool((error <= 0.51 * packed.scale + 1e-4).all())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("SCB", torch.ones(7), "a.SCB has shape"),
        ("SCB", torch.ones(8, dtype=torch.float64), "a.SCB must be float32"),
        ("SCB", torch.full((8,), torch.inf), "a.SCB must be finite"),
        ("weight", torch.ones(8, 16), "a.weight must be int8"),
        ("weight", torch.ones(8, dtype=torch.int8), "two dimensions"),
        ("weight_format", torch.tensor(2, dtype=torch.uint8), "codes row by row"),
    ],
)
def test_damaged_layers_are_one_sentence(name: str, tensor: Tensor, message: str) -> None:
    tensors = llm_int8.to_tensors(int8.pack(weights(8, 16)), "a")
    assert isinstance(formats.read(CONFIG, tensors, "a"), PackedWeight)
    with pytest.raises(UserError, match=message):
        formats.read(CONFIG, tensors | {f"a.{name}": tensor}, "a")


@pytest.mark.parametrize("changes", [{"load_in_4bit": True}, {"load_in_8bit": False, "_load_in_8bit": False}])
def test_configurations_that_are_not_read(changes: dict[str, Any]) -> None:
    formats.check_supported(CONFIG)
    with pytest.raises(UserError, match=r"nf4 and LLM\.int8 are read"):
        formats.check_supported(CONFIG | changes)
