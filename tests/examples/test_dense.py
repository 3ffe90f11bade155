"""examples/compare/dense.py: each format's files become the weights that their codes, scales and zeros stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

N, K, GROUP = 64, 96, 32


def packed(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes from 0 up as int32 words: a row is one number, its first code the lowest bits."""
    words = -(-codes.shape[1] * bits // 32)
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * place) for place, code in enumerate(row))
        rows.append([(number >> (32 * word)) & 0xFFFFFFFF for word in range(words)])
    return (torch.tensor(rows, dtype=torch.int64) << 32 >> 32).to(torch.int32)


def saved(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None) -> Path:
    config: dict[str, Any] = {"model_type": "llama"}
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@given(bits=st.integers(2, 8), count=st.integers(1, 100), seed=st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_codes_come_out_as_they_went_in(compare: Any, bits: int, count: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, count), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(compare("dense").unpack(packed(codes, bits), bits, count), codes)


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_files_with_activation_order(compare: Any, tmp_path: Path, bits: int, layout: str) -> None:
    torch.manual_seed(bits)
    top = 1 << bits
    codes, zeros = torch.randint(0, top, (N, K)), torch.randint(0, top, (N, K // GROUP))
    zeros[0] = 0  # which the first layout stores as the field's largest value
    scale = torch.rand(N, K // GROUP).half()
    group = (torch.randperm(K) // GROUP).int()
    stored = zeros if layout == "gptq_v2" else (zeros - 1) % top
    tensors = {
        "a.qweight": packed(codes, bits).T,
        "a.qzeros": packed(stored.T, bits),
        "a.scales": scale.T,
        "a.g_idx": group,
        "norm.weight": torch.rand(K).bfloat16(),
    }
    quantization = {"quant_method": "gptq", "bits": bits, "checkpoint_format": layout}
    weights = compare("dense").read(saved(tmp_path, tensors, quantization)).weights
    expected = (codes - zeros[:, group.long()]).float() * scale.float()[:, group.long()]
    assert set(weights) == {"a.weight", "norm.weight"}
    assert torch.equal(weights["a.weight"], expected)
    assert torch.equal(weights["norm.weight"], tensors["norm.weight"].float())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_packed_files_with_zero_points_and_order(compare: Any, tmp_path: Path, bits: int) -> None:
    """The words are written by the format's own library."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    torch.manual_seed(bits)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (N, K), dtype=torch.int8)
    zeros = torch.randint(-half, half, (N, K // GROUP), dtype=torch.int8)
    scale, group = torch.rand(N, K // GROUP).bfloat16(), (torch.randperm(K) // GROUP).int()
    tensors = {
        "a.weight_packed": helpers.pack_to_int32(codes, bits),
        "a.weight_zero_point": helpers.pack_to_int32(zeros, bits, packed_dim=0),
        "a.weight_scale": scale,
        "a.weight_shape": torch.tensor([N, K]),
        "a.weight_g_idx": group,
    }
    about = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": bits}}}}
    weights = compare("dense").read(saved(tmp_path, tensors, about)).weights
    spread = [values.float()[:, group.long()] for values in (zeros, scale)]
    assert torch.equal(weights["a.weight"], (codes.float() - spread[0]) * spread[1])


def w8a8(inputs: dict[str, Any]) -> dict[str, Any]:
    group = {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8} | inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def test_int8_files_carry_how_inputs_are_rounded(compare: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    codes, scale = torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N, 1)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.input_scale": torch.tensor([0.5])}
    found = compare("dense").read(saved(tmp_path, tensors, w8a8({"dynamic": False})))
    assert torch.equal(found.weights["a.weight"], codes.float() * scale)
    x = torch.tensor([0.2, 0.3, -64.0, 63.5, 99.0, -99.0])
    assert found.inputs["a"].round(x).tolist() == [0.0, 0.5, -64.0, 63.5, 63.5, -64.0]
    shifted = compare("dense").StaticInput(scale=0.5, zero=-28.0, bits=8)
    assert shifted.round(torch.tensor([-99.0, 99.0])).tolist() == [-50.0, 77.5]


def test_what_is_not_known_is_refused(compare: Any, tmp_path: Path) -> None:
    read, tensors = compare("dense").read, {"a.weight": torch.ones(N, K, dtype=torch.int8)}
    tensors["a.weight_scale"] = torch.ones(N, 1)
    with pytest.raises(ValueError, match="static scale per tensor"):
        read(saved(tmp_path, tensors, w8a8({"dynamic": True})))
    with pytest.raises(ValueError, match="static scale per tensor"):
        read(saved(tmp_path, tensors, w8a8({"dynamic": False})))  # which the file has no scale for
    with pytest.raises(ValueError, match="quant_method 'awq'"):
        read(saved(tmp_path, tensors, {"quant_method": "awq"}))
    with pytest.raises(ValueError, match="gptq_p"):
        read(saved(tmp_path, tensors, {"quant_method": "gptq", "bits": 3, "checkpoint_format": "gptq_p"}))


@pytest.mark.parametrize("recipe", ["int4-rtn", "original"])
def test_both_readers_of_the_house_agree(compare: Any, pair_target: Callable[[str], Path], recipe: str) -> None:
    from runtime.checkpoints.open import open_checkpoint
    from runtime.formats import dequantize
    from runtime.formats.packed import PackedWeight

    model = pair_target(recipe)
    weights, checkpoint = compare("dense").read(model).weights, open_checkpoint(model)
    layers = [name for name in weights if name.endswith("_proj.weight")]
    assert len(layers) == 28
    for name in layers:
        weight = checkpoint.weight(name.removesuffix(".weight"))
        expected = dequantize(weight) if isinstance(weight, PackedWeight) else weight.float()
        assert torch.equal(weights[name], expected)
