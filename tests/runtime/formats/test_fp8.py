"""fp8: what compressed-tensors wrote is read exactly, and runs as float32 weights do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import formats, load
from runtime.checkpoints.open import open_checkpoint
from runtime.errors import UserError
from runtime.formats import dequantize, fp8
from runtime.formats.packed import PackedWeight, Scheme
from runtime.kernels.reference import float_linear, packed_linear

quantization = pytest.importorskip("compressed_tensors.quantization")
Tiny = Callable[..., Path]
SCHEME = Scheme("fp8", 8, 0, True, "float")
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
DYNAMIC, STATIC = ({"strategy": s, "dynamic": d} for s, d in (("token", True), ("tensor", False)))


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    """float32 rows over six orders of magnitude, which reach E4M3's subnormals."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator) * 10 ** (6 * torch.rand(n, k, generator=generator) - 3)


def group(strategy: str = "channel", inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A group of a configuration."""
    activations = None if inputs is None else FLOAT | inputs
    return {"targets": ["Linear"], "weights": FLOAT | {"strategy": strategy}, "input_activations": activations}


def configured(*groups: dict[str, Any]) -> dict[str, Any]:
    """A configuration as config.json has it."""
    named = {f"group_{i}": one for i, one in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": named,
        "ignore": ["lm_head"],
    }


def library_compresses(weight: Tensor, described: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, Tensor], Any]:
    """The library's own scales and codes, and the weights that it makes of them, float32."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = quantization.QuantizationScheme.model_validate(described)
    rows = weight if scheme.weights.strategy == "channel" else weight.view(1, -1)
    scale, _ = calculate_qparams(rows.amin(1, keepdim=True), rows.amax(1, keepdim=True), scheme.weights)
    scale = (scale if len(rows) > 1 or len(weight) == 1 else scale.view(1)).to(dtype)
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    stored = compressor.compress({"weight": weight, "weight_scale": scale.float()}, scheme)
    dense = compressor.decompress(stored, scheme)["weight"]
    return stored | {"weight_scale": scale}, dense


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize(("n", "k"), [(1, 7), (13, 96), (64, 33)])
def test_layers_of_the_library_are_read_exactly(strategy: str, n: int, k: int, dtype: torch.dtype) -> None:
    stored, dense = library_compresses(weights(n, k), group(strategy), dtype)
    config = configured(group(strategy, DYNAMIC))
    formats.check_supported(config)
    packed = formats.read(config, {f"a.{name}": tensor for name, tensor in stored.items()}, "a")
    assert isinstance(packed, PackedWeight) and packed.scheme == SCHEME and packed.scale.shape == (n, 1)
    assert torch.equal(formats.dequantize(packed), dense)
    if strategy == "channel":
        # Our rounding is the library's, and what we write are its bytes.
        mine = fp8.to_tensors(fp8.pack(weights(n, k), scale_dtype=dtype), "a", scale_dtype=dtype)
        assert torch.equal(mine["a.weight"].view(torch.uint8), stored["weight"].view(torch.uint8))
        assert torch.equal(mine["a.weight_scale"], stored["weight_scale"])


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 20), k=st.integers(1, 70), seed=st.integers(0, 1000), power=st.floats(-20, 20))
def test_any_weight_is_rounded_to_its_nearest_code_and_survives_the_file(
    n: int, k: int, seed: int, power: float
) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 10**power
    packed = fp8.pack(weight, bias=torch.ones(n))
    back = fp8.from_tensors(fp8.to_tensors(packed, "a"), "a")
    assert torch.equal(dequantize(back), dequantize(packed)) and torch.equal(back.scale, packed.scale)
    assert torch.equal(back.bias, torch.ones(n))
    # Half a unit of three bits of mantissa, or of the subnormals' 2⁻⁹; a row's largest also by what the scale lost.
    error = (dequantize(packed) - weight).abs()
    assert (error <= (weight.abs() / 16).maximum(packed.scale * 2.0**-10) * 1.01).all()


def test_size_is_eight_bits_and_the_scales(bits_per_weight: Callable[[PackedWeight], float]) -> None:
    assert bits_per_weight(fp8.pack(weights(4, 64))) == 8 + 16 / 64


def damaged(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors = {"a.weight": weights(4, 8).to(fp8.DTYPE), "a.weight_scale": torch.rand(4, 1)}
    changed = tensors | {f"a.{name}": tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in changed.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale": None}, r"a\.weight_scale is missing"),
        ({"weight_scale": torch.ones(2, 4)}, r"a.weight_scale has shape \[2, 4\], expected \[4, 1\]"),
        ({"weight_scale": torch.full((4, 1), torch.nan)}, "a.weight_scale must be finite"),
        ({"weight_scale": torch.ones(4, 1, dtype=torch.int32)}, "a.weight_scale must be"),
        ({"weight": torch.full((4, 8), torch.nan).to(fp8.DTYPE)}, "a.weight must be finite"),
        ({"weight": torch.ones(8).to(fp8.DTYPE)}, "two dimensions"),
        ({"weight": torch.ones(4, 8, dtype=torch.int8)}, "one kind of int8 input"),
        ({"weight_zero_point": torch.ones(4, 1).to(fp8.DTYPE)}, "without zero points"),
    ],
)
def test_damaged_layers_are_one_sentence(changes: dict[str, Tensor | None], message: str) -> None:
    config = configured(group())
    assert isinstance(formats.read(config, damaged(), "a"), PackedWeight)
    with pytest.raises(UserError, match=message):
        formats.read(config, damaged(**changes), "a")


def test_codes_that_the_configuration_does_not_name_are_refused() -> None:
    integers = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    with pytest.raises(UserError, match=r"no group of config\.json is float-quantized"):
        formats.read(configured(integers) | {"format": "int-quantized"}, damaged(), "a")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (group("block"), "by channel or tensor.*strategy 'block'"),
        (group("group"), "strategy 'group'"),
        ({"weights": {"num_bits": 4, "type": "float"}}, "num_bits 4"),
        ({"weights": {"num_bits": 8, "type": "int"}}, "found type 'int'"),
        (group() | {"input_activations": {"num_bits": 8, "type": "int"}}, "8-bit floats are read"),
    ],
)
def test_other_configurations_are_refused(changed: dict[str, Any], message: str) -> None:
    for fine in (group(), group("tensor", STATIC), group("channel", DYNAMIC)):
        formats.check_supported(configured(fine))
    with pytest.raises(UserError, match=message):
        formats.check_supported(configured(changed))


def test_reference_is_the_float32_layer_of_its_values() -> None:
    packed = fp8.pack(weights(13, 70), bias=torch.randn(13, generator=torch.Generator().manual_seed(1)))
    x = weights(5, 70, seed=2)
    expected = float_linear(dequantize(packed), packed.bias)(x)
    assert torch.equal(packed_linear(packed)(x), expected)


def write_model(source: Path, out: Path, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """A model whose projections the library compressed; the dense weights that they stand for."""
    stored, dense = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        prefix = name.removesuffix(".weight")
        made, dense[prefix] = library_compresses(tensor.float(), group("channel"), torch.float32)
        if inputs == STATIC:
            made["input_scale"] = torch.tensor([0.02])
        stored |= {f"{prefix}.{part}": value for part, value in made.items()}
    out.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = configured(group("channel", inputs))
    (out / "config.json").write_text(json.dumps(config))
    for file in source.glob("*token*"):
        (out / file.name).write_bytes(file.read_bytes())
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    return dense


@pytest.mark.parametrize("inputs", [DYNAMIC, STATIC], ids=["dynamic", "static"])
def test_models_of_the_library_run_on_every_kernel(
    inputs: dict[str, Any], kernels: str, tiny: Tiny, tmp_path: Path, text: Any, whole: Any, torch_threads: None
) -> None:
    from transformers import AutoModelForCausalLM

    dense = write_model(tiny("llama"), tmp_path / "m", inputs)
    checkpoint = open_checkpoint(tmp_path / "m")
    for prefix, weight in dense.items():
        assert torch.equal(formats.dequantize(checkpoint.weight(prefix)), weight)
    plain = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32)
    plain.load_state_dict({f"{prefix}.weight": weight for prefix, weight in dense.items()}, strict=False)
    tokens = text(20)
    with torch.no_grad():
        expected = plain(tokens.view(1, -1)).logits[0]
    decoder = load(tmp_path / "m", threads=1, kernels=kernels).decoder
    assert torch.allclose(whole(decoder, tokens), expected, rtol=1e-3, atol=1e-4)
