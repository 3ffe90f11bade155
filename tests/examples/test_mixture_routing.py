"""examples/mixture_routing.py: the model of its making routes as it was told, and shared experts are read once."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime import load
from runtime.bench.shapes import SHAPES, Shape
from runtime.contract import Rows
from runtime.model.native import NativeDecoder

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENS = 300
_DRAFT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 1}
SMALL = {
    "olmoe": {"intermediate_size": 32},
    "qwen2": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 96, "intermediate_size": 64},
}
_SIZES = {"hidden_size": 544, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
_ENDS = {"vocab_size": 2000, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield __import__("mixture_routing")
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in ("mixture_routing", "small_mixture"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("form", ["qwen2", pytest.param("olmoe", marks=pytest.mark.slow)])
def test_tokens_go_where_they_were_sent(
    form: str, example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = example.FORMS[form]
    sizes = {**SHAPES[about.shape].config, **_SIZES, **SMALL[form], **_ENDS}
    draft = {**SHAPES[example.DRAFT].config, **_DRAFT, "num_key_value_heads": 1}
    tiny = {about.shape: Shape(about.shape, sizes), example.DRAFT: Shape(example.DRAFT, draft)}
    for module in ("mixture_routing", "runtime.bench.random_models"):
        monkeypatch.setattr(sys.modules[module], "SHAPES", MappingProxyType({**SHAPES, **tiny}))
    chosen = torch.rand(4, TOKENS, 64, generator=torch.Generator().manual_seed(3)).topk(8).indices
    example.write(replace(about, changes=_ENDS, layers=None), chosen, tmp_path, None)
    decoder = load(tmp_path / "model", threads=1).decoder
    if not isinstance(decoder, NativeDecoder):
        pytest.skip("experts are counted by the native kernels, which were not built")
    for first, width in ((7, 1), (30, 4), (290, 16)):
        ids, cache = torch.arange(first, first + width), decoder.new_cache()
        before = decoder.experts_read
        found = decoder.forward(ids, Rows.chains([(cache.open(width), 0, width)]), cache).logits.argmax(1)
        assert torch.equal(found, ids + 1)
        # Of each layer every expert that any row goes to, once.
        marked = torch.zeros(2, 64).scatter_(1, chosen[:2, ids % TOKENS].flatten(1), 1.0)
        assert decoder.experts_read - before == marked.sum() < 2 * 8 * max(width, 1.5)
    for name, value in {"PROMPTS": 2, "FIRST": 1, "NEW_TOKENS": 12}.items():
        monkeypatch.setattr(example, name, value)
    example.speculate(load(tmp_path / "model", threads=1), load(tmp_path / "draft", threads=1), [0.9], rounds=2)
    accepted, *figures, differ = capsys.readouterr().out.strip().splitlines()[-1].split()
    speedup, with_prompts, least, first, least_of_first = map(float, figures[-5:])
    assert accepted == "0.9" and differ == "0"
    assert 0 < least <= with_prompts and 0 < least_of_first <= first and speedup > 0


def test_a_run_of_equal_tokens_reads_as_many_experts_as_one(example: Any) -> None:
    small = sys.modules["small_mixture"]
    one = torch.rand(4, 1, 64, generator=torch.Generator().manual_seed(1)).topk(8).indices
    assert small.distinct(one.expand(4, 32, 8), 4) == 8
    apart = torch.arange(64).view(1, 8, 8).repeat(4, 4, 1)
    assert [small.distinct(apart, width) for width in (1, 2, 4, 8)] == [8, 16, 32, 64]


def test_the_loss_is_that_of_the_likely_tokens(example: Any) -> None:
    """Where all of the vocabulary is among the drawn ones: the usual loss, and the form's own on top."""
    small = sys.modules["small_mixture"]
    torch.manual_seed(0)
    model = small.small_mixture(small.FORMS["qwen2"], 90)
    ids = torch.randint(1, 90, (2, 12))
    found = small.sampled_loss(model, ids, np.random.default_rng(0))
    assert found.item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-4)
    draws = SimpleNamespace(integers=lambda *_: np.zeros(1, dtype=np.int64))
    assert small.sampled_loss(model, ids, draws).item() < found.item()
