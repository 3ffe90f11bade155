"""What leaves whole neurons, heads and blocks out, and every method's artifact read back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import UserError
from runtime.checkpoints.open import open_checkpoint
from tests.compress.pipeline.calibrated.watched import ROUND, WANDA, Spy, Tiny, digest, hidden
from tests.compress.pipeline.small_runs import damaged


@pytest.mark.parametrize("kind", ["llama", "phi3", "qwen3"])
def test_width_gives_a_smaller_model_that_loads(tiny: Tiny, go: Any, spy: Spy, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    from compress.artifact import Artifact

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = tiny(kind, **sizes, **({"head_dim": 16} if kind != "phi3" else {}))
    out, facts = go(model, {"prune": {"method": "width", "share": 0.25}})
    before, after = open_checkpoint(model), open_checkpoint(out / "model")
    assert facts.pruned == ()

    def blocks(checkpoint: Any) -> int:
        return sum(checkpoint.tensor(name).numel() for name in checkpoint.names() if ".layers." in name)

    assert blocks(after) <= 0.75 * blocks(before)
    assert after.config["intermediate_size"] < 512 and after.config["hidden_size"] == 128
    tokens = torch.tensor([[5, 99, 14, 300, 7, 123, 200, 31]])
    loaded = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    assert torch.isfinite(loaded(tokens).logits).all()
    # The second block was given what the narrow first one gives.
    states = hidden(out / "model", spy.tokens, 1)
    torch.testing.assert_close(spy.inputs[1], states, rtol=1e-3, atol=1e-3)
    Artifact(out).verify()


def least_influential(model: Path, tokens: Tensor, blocks: int) -> int:
    from compress.prune.depth import influence

    states = [hidden(model, tokens, block) for block in range(blocks)]
    # The last state is normed, so the last block is asked for what it gives.
    found = [influence([(states[i], states[i + 1])]) for i in range(blocks - 1)]
    return min(range(blocks - 1), key=found.__getitem__)


def test_depth_takes_whole_blocks_and_renumbers_the_rest(tiny: Tiny, go: Any, spy: Spy, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    def quieten(tensors: dict[str, Tensor]) -> None:
        # Block 1 hardly changes anything, so it is the one to go.
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.1.{name}.weight"] *= 0.01

    model = damaged(tiny("llama", num_hidden_layers=4), tmp_path, quieten)
    lines: list[str] = []
    out, facts = go(model, {"prune": {"method": "depth", "share": 0.25}}, ROUND, note=lines.append)
    assert least_influential(model, spy.tokens, 4) == 1
    assert "blocks 2 of 4 go: least influence" in lines
    stored = open_checkpoint(out / "model")
    assert stored.config["num_hidden_layers"] == 3
    assert {name.split(".")[2] for name in stored.names() if ".layers." in name} == {"0", "1", "2"}
    assert {layer.name.split(".")[2] for layer in facts.layers} == {"0", "1", "2"} and len(facts.layers) == 21
    assert "model.layers.*.input_layernorm.weight (3)" in {entry.layer for entry in facts.left_alone}
    # The second block that stays is given what the first one gives.
    torch.testing.assert_close(spy.inputs[1], hidden(out / "model", spy.tokens, 1), rtol=1e-3, atol=1e-3)
    original = open_checkpoint(model).tensor("model.layers.2.input_layernorm.weight")
    assert torch.equal(stored.tensor("model.layers.1.input_layernorm.weight"), original)
    loaded = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    assert torch.isfinite(loaded(torch.tensor([[5, 99, 14, 300]])).logits).all()


def test_depth_resumes_in_its_look_at_the_blocks(
    tiny: Tiny, go: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.pipeline import sequential

    depth = {"prune": {"method": "depth", "share": 0.25}}
    model = tiny("llama", num_hidden_layers=4)
    straight, _ = go(model, depth, WANDA, out="straight")
    influence, calls = sequential.influence, list[int]()

    def cut(pairs: Any) -> float:
        calls.append(1)
        if len(calls) == 8:
            raise RuntimeError("power cut")
        return influence(pairs)

    monkeypatch.setattr(sequential, "influence", cut)
    with pytest.raises(RuntimeError, match="power cut"):
        go(model, depth, WANDA)
    assert (tmp_path / "out.partial" / "inputs-00002.bin").is_file()
    calls[:] = [1] * 8
    go(model, depth, WANDA, resume=True)
    # Three windows of each of the two blocks that were not looked at yet.
    assert len(calls) == 8 + 6
    assert digest(tmp_path / "out") == digest(straight)


CALIBRATED: dict[str, list[dict[str, Any]]] = {
    "gptq": [{"quantize": {"scheme": "int4", "group_size": 32, "method": "gptq"}}],
    "gptq3": [{"quantize": {"scheme": "int3", "group_size": 32, "method": "gptq", "act_order": True, "search": True}}],
    "awq": [{"quantize": {"scheme": "int4", "group_size": 32, "method": "awq"}}],
    "static": [{"quantize": {"scheme": "int8-static"}}],
    "smooth": [{"smooth": {"alpha": 0.5}}, {"quantize": {"scheme": "int8-static"}}],
    "smooth-search": [{"smooth": {"alpha": "search"}}, {"quantize": {"scheme": "int8-dynamic"}}],
    "asymmetric": [{"quantize": {"scheme": "int4", "group_size": 64, "symmetric": False, "method": "gptq"}}],
    "hqq": [{"quantize": {"scheme": "int3", "group_size": 32, "method": "hqq"}}],
    "hqq-pruned": [WANDA, {"quantize": {"scheme": "int4", "group_size": 32, "method": "hqq", "symmetric": True}}],
    "searched": [{"quantize": {"scheme": "int2", "group_size": 32, "search": True}}],
}


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("kind", ["qwen3", "phi3", "mixtral"])
def test_every_method_gives_a_model_that_reads_back(tiny: Tiny, go: Any, name: str, kind: str) -> None:
    if kind == "mixtral" and name in ("asymmetric", "static", "smooth", "hqq"):
        with pytest.raises(UserError, match="transformers joins no such tensors"):
            go(tiny(kind), *CALIBRATED[name])
        return
    out, facts = go(tiny(kind), *CALIBRATED[name])
    stored = open_checkpoint(out / "model")
    assert len(facts.layers) == {"qwen3": 14, "phi3": 8, "mixtral": 2 * (4 + 12)}[kind]
    for layer in facts.layers:
        weight = stored.weight(layer.name)
        assert not isinstance(weight, Tensor)
        assert (weight.input_scale is not None) == (layer.scheme == "int8-static")
        assert layer.error < {"int2": 0.8, "int3": 0.4, "int4": 0.2}.get(layer.scheme, 0.05)
        assert (layer.output_error is not None) == name.startswith(("gptq", "asym"))
        assert layer.stored_bytes > 0


def test_gptq_is_nearer_than_rounding(tiny: Tiny, go: Any, spy: Spy) -> None:
    quantise = {"scheme": "int3", "group_size": 32}
    model = tiny("llama")
    out: dict[str, Path] = {}
    for method in ("rtn", "gptq"):
        out[method], _ = go(model, {"quantize": quantise | {"method": method}}, out=method, samples=12)
    exact = hidden(model, spy.tokens, 1)
    far = {method: float((hidden(path / "model", spy.tokens, 1) - exact).norm()) for method, path in out.items()}
    assert far["gptq"] < 0.95 * far["rtn"]
