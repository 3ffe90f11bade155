"""Calibrated caches of latent attention, where a token has one vector for the keys and values of all heads."""

from pathlib import Path

import pytest
import torch

from compress.stages import kv_cache
from compress.stages.kv_cache import Kind
from runtime import Speculator, load
from runtime.model.base import BaseDecoder
from runtime.speculate import CacheOptions
from runtime.speculative.drafters.lookup import LookupDrafter
from tests.runtime.model.families import VOCABULARY, write


@pytest.mark.parametrize("kind", ["int8", "int3"])
def test_drafts_change_no_token_on_a_calibrated_cache(tmp_path: Path, kind: Kind) -> None:
    path = write("deepseek_v3", tmp_path / "model")
    tokens = torch.randint(1, VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(3))
    found = kv_cache.calibrate(path, kind, tokens[:2], rotated=kind == "int3")
    own = found.tensors()
    if kind == "int8":
        # The shared key and the vector; values have no factors.
        factors = torch.stack(list(own.values()))
        assert tuple(factors.shape) == (2, 1, 80) and not torch.equal(factors, torch.ones(2, 1, 80))
    else:
        vector = own["model.layers.1.self_attn.value_basis"]
        assert vector.shape[:2] == (1, 3) and own["model.layers.1.self_attn.key_basis"].shape == (1, 3, 80, 80)
    drafter = load(path, threads=1)
    kv_cache.attach(path, found)
    target, prompts = load(path, threads=1), tokens[2:, :20].tolist()
    assert isinstance(target.decoder, BaseDecoder) and target.decoder.kv.kind == kind
    plain, looked_up, drafted = (
        [result.tokens for result in Speculator(target, draft, 4, cache=CacheOptions("auto")).generate(prompts, 24)]
        for draft in (None, LookupDrafter(), drafter)
    )
    assert plain == looked_up == drafted
