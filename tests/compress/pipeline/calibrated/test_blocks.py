"""The calibrated pass: what goes into each block, what stages see, and what is written."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calib.moments import Wants
from compress.artifact import manifest
from compress.calibration import activations
from compress.calibration.activations import Activations, Inputs
from compress.model.block import Block
from compress.pipeline import forecast
from runtime.checkpoints.open import open_checkpoint
from tests.compress.pipeline.calibrated.watched import ROUND, WANDA, Spy, Tiny, counting, digest, hidden


def test_a_block_reads_what_the_compressed_blocks_before_it_give(tiny: Tiny, go: Any, spy: Spy) -> None:
    out, facts = go(tiny("mistral"), WANDA, ROUND)
    assert len(facts.layers) == 14
    torch.testing.assert_close(spy.inputs[0], hidden(tiny("mistral"), spy.tokens, 0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(spy.inputs[1], hidden(out / "model", spy.tokens, 1), rtol=1e-3, atol=1e-3)
    far = (spy.inputs[1] - hidden(tiny("mistral"), spy.tokens, 1)).norm() / spy.inputs[1].norm()
    assert far > 0.05


def test_one_pass_feeds_all_stages_and_shared_inputs_are_counted_once(
    tiny: Tiny, go: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    for name in ("show", "following"):
        monkeypatch.setattr(Inputs, name, counting(name, getattr(Inputs, name), calls))
    go(tiny("llama"), WANDA)
    # Statistics and then outputs; after the last block nobody needs any.
    assert calls == [("show", 0), ("following", 0), ("show", 1)]
    first = spy.statistics[0]
    assert first["self_attn.q_proj"] is first["self_attn.k_proj"] is first["self_attn.v_proj"]
    assert first["mlp.gate_proj"] is first["mlp.up_proj"]
    assert len({id(moments) for moments in first.values()}) == 4
    assert all(moments.tokens == 3 * 32 for moments in first.values())


@pytest.mark.parametrize(("kind", "whole"), [("llama", False), ("mixtral", True)])
def test_a_window_is_left_when_its_last_input_was_seen(
    tiny: Tiny, go: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch, kind: str, whole: bool
) -> None:
    finished: list[nn.Module] = []
    show = Inputs.show

    def watched(self: Inputs, block: Block) -> Iterator[None]:
        hooks = [m.register_forward_hook(lambda module, *_: finished.append(module)) for m in block.linears.values()]
        yield from show(self, block)
        for hook in hooks:
            hook.remove()

    monkeypatch.setattr(Inputs, "show", watched)
    go(tiny(kind), WANDA, samples=5)
    for block in spy.blocks:
        done = {path: sum(module is one for one in finished) for path, module in block.linears.items()}
        # Experts that few tokens reach are shown all of them in a second pass.
        assert done["self_attn.q_proj"] == done["self_attn.o_proj"] == (10 if whole else 5)
        last = [count for path, count in done.items() if path.endswith("down_proj")]
        # The first window goes through to the end: it tells how many inputs there are, and what the block gives.
        assert last == [1] if not whole else min(last) >= 5 and len(last) > 1
        assert all(moments.tokens == 5 * 32 for moments in spy.statistics[block.number].values())


def test_what_the_statistics_are_of(tiny: Tiny, go: Any, spy: Spy) -> None:
    go(tiny("qwen2"), WANDA)
    block, inputs = spy.blocks[0], spy.inputs[0]
    norm: Any = block.module.get_submodule("input_layernorm")
    x = norm(inputs).flatten(0, 1)
    expected = x.T @ x / len(x)
    found = spy.statistics[0]["self_attn.k_proj"].hessian
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_layers_that_want_other_things_do_not_share(tiny: Tiny, go: Any, spy: Spy) -> None:
    rows = Wants(hessian=True, norms=True, rows=4)
    plain = spy.wants
    spy.wants = lambda block: {**plain(block), "self_attn.k_proj": rows}  # type: ignore[method-assign]
    go(tiny("llama"), WANDA)
    first = spy.statistics[0]
    assert first["self_attn.q_proj"] is first["self_attn.v_proj"] is not first["self_attn.k_proj"]
    assert torch.equal(first["self_attn.q_proj"].hessian, first["self_attn.k_proj"].hessian)  # type: ignore[arg-type]
    assert first["self_attn.k_proj"].rows is not None and len(first["self_attn.k_proj"].rows) == 4


def test_activations_in_a_file_give_the_same_bits(
    tiny: Tiny, go: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = go(tiny("llama"), WANDA, ROUND, out="plain")
    load, kinds, modes = activations.load, list[type](), list[int]()

    def watched(folder: Path, record: dict[str, Any], mapped: bool) -> Activations:
        found = load(folder, record, mapped)
        kinds.append(type(found.data))
        modes.append(stat.S_IMODE((folder / str(record["file"])).stat().st_mode))
        assert [path.name for path in folder.glob("inputs-*")] == [record["file"]]
        return found

    monkeypatch.setattr(activations, "load", watched)
    need = forecast.forecast

    def tight(*given: Any) -> Any:
        found = need(*given)
        monkeypatch.setattr(forecast, "available", lambda: found.memory + found.held - 1)
        return found

    monkeypatch.setattr(forecast, "forecast", tight)
    mapped, _ = go(tiny("llama"), WANDA, ROUND, out="mapped")
    assert kinds == [np.memmap, np.memmap]
    assert modes == [0o600, 0o600]
    assert digest(plain) == digest(mapped)
    assert not list(mapped.glob("inputs-*"))


def test_calibrated_runs_repeat_and_notes_say_how_it_went(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    one, facts = go(tiny("llama"), WANDA, ROUND, out="one", note=lines.append)
    other, _ = go(tiny("llama"), WANDA, ROUND, out="other")
    assert digest(one) == digest(other)
    assert lines[0].startswith("forecast: ")
    assert [line.split(":")[0] for line in lines[1:]] == ["block 1 of 2", "block 2 of 2"]
    assert "mean weight error 0." in lines[1]
    assert facts.calibration["tokens"] == 96 and facts.calibration["samples_used"] == 3
    assert manifest.read(one)["calibration"] == {"samples_requested": 3, "samples_used": 3}
    pruned = open_checkpoint(one / "model").weight("model.layers.0.mlp.up_proj")
    assert not isinstance(pruned, Tensor) and float((pruned.codes == 0).float().mean()) >= 0.5


def test_what_is_pruned_alone_is_a_plain_checkpoint(tiny: Tiny, go: Any) -> None:
    out, facts = go(tiny("gpt2"), WANDA)
    before, after = open_checkpoint(tiny("gpt2")), open_checkpoint(out / "model")
    assert after.quantization is None and before.names() == after.names()
    assert facts.layers == ()
    weight = after.tensor("transformer.h.1.mlp.c_fc.weight")
    # Wanda takes half of what goes into each output; a Conv1D's outputs are columns.
    assert torch.equal((weight == 0).sum(0), torch.full((256,), 32))
    assert not any("c_fc.weight" in entry.layer for entry in facts.left_alone)


def test_starved_experts_are_named_and_handled(tiny: Tiny, go: Any, spy: Spy) -> None:
    quantise = {"scheme": "int4", "group_size": 32}
    experts = {"expert_fallback": "all-tokens", "min_tokens": 50}
    _, facts = go(tiny("mixtral"), WANDA, {"quantize": quantise | {"experts": experts}})
    lines = facts.calibration["experts"]
    assert len(lines) == 2 * 4
    assert sum(e["tokens"] for e in lines if e["block"] == 0) == 2 * 96
    few = [e for e in lines if e["tokens"] < 50]
    assert few and all(e["handled"] == "all tokens" for e in few)
    for entry in lines:
        moments = spy.statistics[entry["block"]][f"mlp.experts.{entry['expert']}.up_proj"]
        assert moments.tokens == (96 if entry in few else entry["tokens"])
