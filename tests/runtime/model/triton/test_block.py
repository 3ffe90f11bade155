"""The block drafter on Triton's kernels: no text changes, and something is drafted."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import Speculator, load
from runtime.engine.metrics import total
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.drafters.block import BlockDrafter
from runtime.speculative.drafters.block_network import load_network
from tests.conftest import write_block
from tests.slices import often


@pytest.mark.parametrize("frequent", often([0, 64], 64))
def test_texts_are_those_of_plain_decoding(
    small: Callable[..., Path], device: str, longer: int, frequent: int, tmp_path: Path
) -> None:
    target = load(small("llama", num_hidden_layers=1), device=device, kernels="triton")
    sizes = {"taps": (0, 1), "length": 3, "layers": 1, "heads": 2, "kv_heads": 1, "window": 4}
    sizes |= {"frequent": frequent}
    network = load_network(write_block(target.path, tmp_path / "block", **sizes), target)
    prompts, samplings, new = [[7, 300, 12, 9], [3, 4, 3]], [Sampling(), Sampling(temperature=0.8, seed=5)], 4 * longer
    plain = Speculator(target, cache=CacheOptions(pages=8)).generate(prompts, new, samplings, stop=())
    fast = Speculator(target, BlockDrafter(network), 3, cache=CacheOptions(pages=8))
    found = fast.generate(prompts, new, samplings, stop=())
    assert [r.tokens for r in found] == [r.tokens for r in plain]
    assert total([r.metrics for r in found]).drafted > 0
