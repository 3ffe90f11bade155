"""The original's activations, which go along with those of the rounded blocks where a stage asks for a drift."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from calib.moments import Moments, Wants
from compress import Recipe, compress
from compress.calibration.activations import Inputs
from compress.model.block import Block, Statistics
from compress.pipeline import passes
from compress.stages import quantize
from runtime.checkpoints.open import open_checkpoint

Tiny = Callable[..., Path]
GPTQ = {"scheme": "int2", "group_size": 32, "method": "gptq"}


class Spy:
    """Stands before the stages, and sees what goes into q_proj: here, and in the original."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, Tensor, Moments]] = []

    def wants(self, block: Block) -> Mapping[str, Wants]:
        return {}

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        assert inputs is not None
        count, norm = len(inputs), block.module.get_submodule("input_layernorm")
        windows = [inputs.activations.window(number) for number in range(len(inputs.activations))]
        here, there = (norm(torch.cat(part)).flatten(0, 1) for part in (windows[:count], windows[count:]))
        self.found.append((here, there, statistics["self_attn.q_proj"]))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    text = tmp_path / "code.txt"
    text.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))

    def go(model: Path, out: str, **keys: Any) -> Path:
        recipe = Recipe.model_validate({"name": "own", "stages": [{"quantize": {**GPTQ, **keys}}]})
        options: dict[str, Any] = {"calib": str(text), "seq_len": 32, "eval_tokens": 64, "samples": 3}
        return compress(model, recipe, tmp_path / out, report=lambda *_: None, **options).model

    return go


def test_a_drift_is_of_what_the_original_has_there(
    tiny: Tiny, run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spy, make = Spy(), quantize.make_stages
    monkeypatch.setattr(passes, "make_stages", lambda *given: [spy, *make(*given)])
    model = run(tiny("llama"), "out", drift=1.0)
    assert not list(model.parent.glob("inputs-*"))
    (here, there, first), (later, original, second) = spy.found
    assert torch.equal(here, there) and not first.drift.any()
    # The second block reads what the rounded first one gives, and beside it what the original's gives.
    assert float((later - original).norm() / original.norm()) > 0.05
    expected = (original - later).T @ later / len(later)
    torch.testing.assert_close(second.drift, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second.hessian, later.T @ later / len(later), rtol=1e-4, atol=1e-5)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32)
    assert len(original) == 3 * 32 and original.shape[1] == loaded.config.hidden_size


def test_only_blocks_after_the_first_are_rounded_otherwise(tiny: Tiny, run: Callable[..., Path]) -> None:
    plain, drifted = (open_checkpoint(run(tiny("llama"), f"out{share}", drift=share)) for share in (0.0, 1.0))
    names = [name for name in plain.names() if name.endswith("weight_packed")]
    changed = {name for name in names if not torch.equal(plain.tensor(name), drifted.tensor(name))}
    assert changed and all(name.startswith("model.layers.1.") for name in changed)


def test_experts_have_none_and_the_others_do(tiny: Tiny, run: Callable[..., Path]) -> None:
    plain, drifted = (open_checkpoint(run(tiny("mixtral"), f"out{share}", drift=share)) for share in (0.0, 1.0))
    name = "model.layers.1.self_attn.q_proj"
    assert not torch.equal(plain.weight(name).codes, drifted.weight(name).codes)  # type: ignore[union-attr]


@pytest.mark.parametrize(("keys", "expected"), [({"method": "rtn"}, "drift: expected"), ({"drift": 1.5}, "less than")])
def test_what_a_stage_may_not_say(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Recipe.model_validate({"name": "own", "stages": [{"quantize": {**GPTQ, "drift": 0.5, **keys}}]})
