"""What fits a device, and what is said where it does not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime import load
from runtime.errors import UserError
from runtime.model.triton.cache import Need, needed, require_pages, require_room
from tests.runtime.model.families import write


def test_a_model_that_does_not_fit(tiny: Callable[..., Path], tmp_path: Path, device: str) -> None:
    decoder = load(tiny("llama"), device=device, kernels="triton").decoder
    need = needed(decoder.architecture, decoder.weight_bytes)  # type: ignore[attr-defined]
    assert need.weights == decoder.weight_bytes  # type: ignore[attr-defined]
    # The cache of a text of all 256 positions is what its pages take.
    assert need.cache == 256 * decoder.new_cache().bytes_per_token()
    assert sum(need) == need.weights + need.cache + need.work
    require_room("model", need, sum(need))
    latent = load(write("youtu", tmp_path / "youtu"), device=device, kernels="triton").decoder
    # Keys of 80 dimensions and values of 70, for one head.
    found = needed(latent.architecture, latent.weight_bytes)  # type: ignore[attr-defined]
    assert found.cache == 512 * latent.new_cache().bytes_per_token()
    mixture = load(tiny("mixtral"), kernels="reference").decoder
    size = mixture.weight_bytes  # type: ignore[attr-defined]
    a = mixture.architecture  # type: ignore[attr-defined]
    # Its experts are stacked block by block.
    assert needed(a, size).work == needed(replace(a, experts=None), size).work + size // 2
    with pytest.raises(UserError, match=r"needs about 5\.00 GB of the GPU .* 4\.00 GB are free"):
        require_room("model", Need(3 * 10**9, 10**9, 10**9), 4 * 10**9)


def test_pages_that_do_not_fit() -> None:
    require_pages(10, 1000, 10_000)
    with pytest.raises(UserError, match=r"11 pages needs 0\.01 GB .* take at most 9 pages"):
        require_pages(11, 1_000_000, 9_900_000)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks a GPU for more than it has")
def test_a_gpu_is_asked(tiny: Callable[..., Path]) -> None:
    decoder = load(tiny("llama"), device="cuda", kernels="triton").decoder
    with pytest.raises(UserError, match=r"pages needs .* of the GPU, and .* are free"):
        decoder.new_cache(pages=10**9)
