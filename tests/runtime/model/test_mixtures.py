"""Mixtures on native kernels: experts that rows share are read once, many rows at once or few, with the same bits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import load
from runtime.contract import Rows
from runtime.model.layers import Mixture
from runtime.model.native import NativeDecoder
from tests.runtime.model.families import pack, write
from tests.runtime.model.test_families import text


@pytest.fixture(scope="module", params=["olmoe", "qwen2_moe", "gpt_oss"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture in int4: alone, beside what all rows go through, and with clamps and biases."""
    folder = tmp_path_factory.mktemp(request.param)
    return pack(write(request.param, folder / "float"), folder / "int4", "int4")[0]


def native(path: Path) -> NativeDecoder:
    found = load(path, threads=2).decoder
    assert isinstance(found, NativeDecoder)
    return found


def together(decoder: NativeDecoder, texts: list[Tensor]) -> Tensor:
    """The logits of several requests, whole texts in one forward."""
    cache = decoder.new_cache()
    rows = Rows.chains([(cache.open(len(tokens)), 0, len(tokens)) for tokens in texts])
    return decoder.forward(torch.cat(texts), rows, cache).logits


def test_rows_that_go_to_the_same_experts_read_them_once(path: Path) -> None:
    decoder, tokens = native(path), text(1)
    together(decoder, [tokens])
    one = decoder.experts_read
    mixtures = [block.mlp for block in decoder.parts.blocks if isinstance(block.mlp, Mixture)]
    assert one == sum(mixture.how.per_token for mixture in mixtures) > 0
    together(decoder, [tokens] * 7)
    assert decoder.experts_read == 2 * one
    # Others go elsewhere: positive evidence that something is counted.
    together(decoder, [text(1, seed) for seed in range(2, 12)])
    assert 3 * one < decoder.experts_read <= 2 * one + sum(len(mixture.experts) for mixture in mixtures)


def test_more_rows_than_are_computed_together(path: Path) -> None:
    """1,300 rows go to 2,600 experts' rows, beyond what is computed at once; each has the bits that it has alone."""
    decoder = native(path)
    texts = [text(100, seed) for seed in range(13)]
    whole = together(decoder, texts)
    assert torch.equal(whole, torch.cat([together(decoder, [tokens]) for tokens in texts]))
