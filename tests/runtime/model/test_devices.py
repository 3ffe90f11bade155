"""Devices by name, and CUDA's failures as sentences. No GPU: torch's own exceptions, raised where a GPU would."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from runtime import load
from runtime.cache.contiguous import ContiguousCache
from runtime.cache.quantizer import CacheFormat
from runtime.devices import explained, explaining, resolve
from runtime.errors import UserError
from runtime.generate import app as generate
from runtime.model.reference import LlamaDecoder

PAIR = Path(__file__).parents[3] / "examples" / "pair" / "target"
OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.94 GiB is free."
    " Including non-PyTorch memory, this process has 77.24 GiB memory in use."
)
Failure: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)
LOST = (
    "CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' in the CUDA documentation.\nCUDA"
    " kernel errors might be asynchronously reported at some other API call, so the stacktrace below may be incorrect."
)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:x", "cpu:1", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="expected cpu, cuda, cuda:N or auto, found"):
        resolve(name)


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_cuda_is_never_replaced_by_the_cpu(name: str) -> None:
    with pytest.raises(UserError, match=rf"device '{name}' was asked for, but torch .* finds no CUDA device"):
        load(PAIR, device=name)


@no_gpu
def test_only_auto_falls_back() -> None:
    assert resolve("auto") == torch.device("cpu") == resolve("cpu")


def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch tells it: a warning, and no device."""

    def told() -> bool:
        text = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."
        warnings.warn(text, stacklevel=2)
        return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", told)
    with pytest.raises(UserError, match=r"needs a newer NVIDIA driver than this machine's .*; update the driver"):
        resolve("cuda")


def test_a_number_that_no_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match="there are 2 CUDA devices, numbered from 0"):
        resolve("cuda:2")


def test_out_of_memory_says_what_was_needed_and_free() -> None:
    text = str(explained(OUT_OF_MEMORY))
    assert "2.00 GiB more were needed, 1.94 GiB were free; take a scheme of fewer bits" in text and "\n" not in text


def test_a_gpu_that_is_gone_is_one_sentence() -> None:
    text = str(explained(Failure(LOST)))
    assert text.startswith("the GPU failed (unspecified launch failure); it may have been taken away or reset")
    assert "\n" not in text


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("CUDA error: no"), KeyError("x")])
def test_other_errors_are_nobody_s_gpu(error: Exception) -> None:
    assert explained(error) is None
    with pytest.raises(type(error)), explaining():
        raise error


def test_loading_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's refusal while weights are moved: only a full GPU raises it by itself."""
    monkeypatch.setattr("runtime.model.load.build", raising(OUT_OF_MEMORY))
    with pytest.raises(UserError, match=r"the GPU is out of memory: 2\.00 GiB more were needed"):
        load(PAIR)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OUT_OF_MEMORY, "a cache of 64 tokens needs 0.0 GB, which this machine refused"),
        (Failure(LOST), "the GPU failed"),
    ],
)
def test_a_cache_that_grows_says_it(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    monkeypatch.setattr("runtime.cache.contiguous.allocate", raising(error))
    with pytest.raises(UserError, match=said):
        ContiguousCache(CacheFormat(2, 2, 16, torch.device("cpu"))).open(10)


@pytest.mark.parametrize(("error", "said"), [(OUT_OF_MEMORY, "out of memory"), (Failure(LOST), "the GPU failed")])
def test_commands_end_in_one_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    """In the middle of a forward, as a GPU's own errors come."""
    monkeypatch.setattr(LlamaDecoder, "forward", raising(error))
    words = ["--target", str(PAIR), "--prompt", "def ", "--kernels", "reference", "--max-new-tokens", "4"]
    result = CliRunner().invoke(generate, words)
    assert result.exit_code == 2 and said in result.output
    assert len([line for line in result.output.splitlines() if line.startswith("error:")]) == 1
    assert "Traceback" not in result.output


@no_gpu
def test_the_compressor_refuses_before_it_works(tmp_path: Path) -> None:
    from compress.run import app as compress

    words = ["--recipe", "nf4", "--device", "cuda", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(compress, words)
    assert result.exit_code == 2 and "error: --device: device 'cuda' was asked for" in result.output
    assert not list(tmp_path.iterdir())


def test_the_compressor_says_what_the_gpu_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import compress.pipeline
    from compress.run import app as compress_app

    monkeypatch.setattr(compress.pipeline, "run", raising(OUT_OF_MEMORY))
    result = CliRunner().invoke(compress_app, ["--recipe", "nf4", "--out", str(tmp_path / "run")])
    assert result.exit_code == 2 and "error: the GPU is out of memory" in result.output


def test_devices_import_no_torch_before_they_are_asked() -> None:
    """`--help` comes in less than the second that torch takes to load."""
    import subprocess

    code = "import sys, runtime.cli, runtime.bench.__main__, runtime.generate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False", "commands must not load torch"
