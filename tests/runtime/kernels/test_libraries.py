"""Other libraries' kernels beside ours: they need CUDA, and what can be said without it is said without it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import load
from runtime.bench.random_models import random_weight
from runtime.contract import Rows
from runtime.errors import UserError
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight
from runtime.kernels.dispatch import choose, linear
from runtime.model.hf_adapter import Through

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DRAFT = Path(__file__).parents[3] / "examples" / "pair" / "draft"


@needs_cuda
@pytest.mark.parametrize("rows", [1, 2, 16, 40])
@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_bitsandbytes_agrees_with_ours(scheme: str, rows: int) -> None:
    """Within what its own rounding of inputs (int8) or products in float32 (nf4) allow."""
    pytest.importorskip("bitsandbytes")
    draws = torch.Generator("cuda").manual_seed(0)
    weight = random_weight(scheme, 96, 256, draws)
    assert isinstance(weight, PackedWeight)
    x = torch.randn(rows, 256, device="cuda", generator=draws)
    theirs = linear(weight, None, choose("bitsandbytes", "cuda"))(x)
    wanted = x.double() @ dequantize(weight).double().t()
    for found in (theirs, linear(weight, None, choose("auto", "cuda"))(x)):
        assert float((found.double() - wanted).norm() / wanted.norm()) < 0.02


@needs_cuda
def test_reference_products_of_integers_have_a_cpu_s_bits() -> None:
    """CUDA's product takes more than 16 rows of eights only."""
    weight = random_weight("int8", 37, 75, torch.Generator().manual_seed(0))
    assert isinstance(weight, PackedWeight)
    x = torch.randn(3, 75, generator=torch.Generator().manual_seed(1))
    here = linear(weight, None, choose("reference", "cpu"))(x)
    moved = PackedWeight(weight.scheme, weight.codes.cuda(), weight.scale.cuda())
    assert torch.equal(linear(moved, None, choose("reference", "cuda"))(x.cuda()).cpu(), here)


@needs_cuda
def test_onnx_runtime_on_cuda_gives_a_cpu_s_logits(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA provider")
    from compress.export import run, silent

    run("onnx", DRAFT, tmp_path / "onnx", silent)
    found = [_logits(load(tmp_path / "onnx", device=device).decoder) for device in ("cpu", "cuda")]
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


def test_onnx_runtime_never_falls_back_silently(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where CUDA's libraries do not load, ONNX Runtime logs it and takes the CPU: here its own CPU session stands for
    that, and only the list of providers is made up."""
    onnxruntime = pytest.importorskip("onnxruntime")
    from runtime.model.onnx.decoder import _session

    real = onnxruntime.InferenceSession
    listed = [*onnxruntime.get_available_providers(), "CUDAExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: listed)
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda path, options, providers: real(path, options, ["CPUExecutionProvider"])
    )
    with pytest.raises(UserError, match="cannot load its CUDA provider; install the CUDA and cuDNN libraries"):
        _session(_identity(tmp_path), "m/model.onnx", torch.device("cuda"), 1)


def _identity(folder: Path) -> Path:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def test_the_adapter_computes_in_the_type_it_is_told() -> None:
    plain = _logits(load(DRAFT, adapter=True).decoder)
    model: Any = load(DRAFT, adapter=Through("bfloat16"))
    assert model.decoder.model.dtype == torch.bfloat16
    found = _logits(model.decoder)
    assert found.dtype == torch.float32 and 0 < float((found - plain).norm() / plain.norm()) < 0.05


def test_the_adapter_refuses_other_types() -> None:
    with pytest.raises(UserError, match="dtype must be one of float32, bfloat16, float16, found 'int8'"):
        Through("int8")  # type: ignore[arg-type]


def test_a_device_map_needs_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.model.hf_adapter.find_spec", lambda name: None)
    with pytest.raises(UserError, match="device_map 'auto' needs accelerate, which is missing"):
        load(DRAFT, adapter=Through(device_map="auto"))


@pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("accelerate") is None, reason="accelerate is not installed"
)
def test_a_device_map_spreads_the_model() -> None:
    found: Any = load(DRAFT, adapter=Through(device_map="auto")).decoder
    torch.testing.assert_close(_logits(found).cpu(), _logits(load(DRAFT, adapter=True).decoder), rtol=1e-3, atol=1e-3)


def _logits(decoder: Any) -> torch.Tensor:
    cache = decoder.new_cache()
    return decoder.forward(torch.tensor([5, 6, 7]), Rows.chains([(cache.open(3), 0, 3)]), cache).logits
