"""Published heads on Triton's kernels, on a GPU or as the interpreter computes them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import Speculator, load
from runtime.sampling.params import Sampling
from runtime.speculative.drafters.by_name import make
from tests.runtime.speculative.heads.published import CONFIGS, LAYERS, write_head


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "peagle", "dspark"])
def test_texts_are_those_of_plain_decoding(small: Callable[..., Path], device: str, tmp_path: Path, name: str) -> None:
    target = load(small("llama", num_hidden_layers=2), device=device, kernels="triton")
    sizes = {"hidden_size": target.decoder.hidden_size, "vocab_size": target.decoder.vocab_size}
    values = CONFIGS[name] | {"transformer_layer_config": LAYERS | sizes}
    if values.get("draft_vocab_size", 64) > 64:
        values["draft_vocab_size"] = sizes["vocab_size"]
    drafter = make(target, name, heads=write_head(tmp_path / "head", values))
    sampling = [Sampling(), Sampling(temperature=0.8, seed=1)]
    prompts = [[5, 6, 7], [8]]
    expected = Speculator(target).generate(prompts, 5, sampling, stop=())
    found = Speculator(target, drafter, 3).generate(prompts, 5, sampling, stop=())
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert sum(one.metrics.drafted for one in found) > 0
