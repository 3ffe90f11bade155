"""The residual stream that decoders give to those who ask, on a GPU or as the interpreter computes it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime import load
from runtime.contract import Rows
from runtime.model.base import BaseDecoder
from tests.slices import often


@pytest.mark.parametrize("rows", often([3, 40], 3))
def test_streams_are_the_references(small: Callable[..., Path], device: str, rows: int) -> None:
    """Few rows are captured as a graph where there are graphs, and many are not; twice, as the first run is eager."""
    path = small("llama", num_hidden_layers=2)
    made = {
        name: load(path, device=where, kernels=name).decoder
        for name, where in (("triton", device), ("reference", "cpu"))
    }
    tokens = torch.arange(1, rows + 1)
    found = []
    for decoder in made.values():
        assert isinstance(decoder, BaseDecoder)
        view = decoder.tapped((2, 0))
        for _ in range(2):
            cache = view.new_cache()
            out = view.forward(tokens, Rows.chains([(cache.open(rows), 0, rows)]), cache, torch.tensor([rows - 1]))
        assert out.taken is not None and out.taken.shape == (rows, 2 * decoder.hidden_size) and len(out.hidden) == 1
        found.append(out.taken.cpu())
        assert decoder.forward(tokens[:0], Rows.chains([]), cache).taken is None
    assert torch.allclose(*found, atol=1e-4)
