"""The calibrated pass of odd and broken models: numbers that are none, starved experts, full disks, resuming."""

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compress.artifact import files
from compress.calibration import activations
from compress.calibration.activations import Inputs
from compress.errors import UserError
from compress.model.block import Block, Statistics
from compress.stages.quantize import RoundToNearest
from runtime.checkpoints.open import open_checkpoint
from tests.compress.pipeline.calibrated.watched import ROUND, WANDA, Spy, Tiny, counting, digest
from tests.compress.pipeline.small_runs import damaged


def test_starved_experts_without_statistics(tiny: Tiny, go: Any, spy: Spy) -> None:
    experts = {"expert_fallback": "rtn", "min_tokens": 1000}
    _, facts = go(tiny("mixtral"), WANDA, {"quantize": {"scheme": "int4", "group_size": 32, "experts": experts}})
    assert {entry["handled"] for entry in facts.calibration["experts"]} == {"rounded to nearest"}
    assert spy.blocks[0].starved == {path for path in spy.blocks[0].linears if ".experts." in path}
    assert set(spy.statistics[0]) == {path for path in spy.blocks[0].linears if ".experts." not in path}
    assert len(facts.layers) == 2 * (4 + 12)


def test_nan_of_one_window_is_named_and_what_is_done_is_kept(
    tiny: Tiny, go: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = RoundToNearest.apply

    def breaking(self: RoundToNearest, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        if block.number == 0:
            act: Any = block.module.get_submodule("mlp")
            forward = act.forward
            calls: list[int] = []

            def spoilt(x: Tensor) -> Tensor:
                calls.append(1)
                out: Tensor = forward(x)
                return out * float("nan") if len(calls) == 2 else out

            act.forward = spoilt
        apply(self, block, statistics, inputs)

    monkeypatch.setattr(RoundToNearest, "apply", breaking)
    with pytest.raises(UserError, match=r"calibration window 2: .*what model\.layers\.0 gives, found NaN") as caught:
        go(tiny("llama"), WANDA, ROUND)
    assert "out.partial is kept for --resume" in caught.value.__notes__
    monkeypatch.undo()
    go(tiny("llama"), WANDA, ROUND, resume=True)
    go(tiny("llama"), WANDA, ROUND, out="straight")
    assert digest(tmp_path / "out") == digest(tmp_path / "straight")


def test_finite_numbers_may_add_up_to_more_than_a_float_holds() -> None:
    large = torch.full((1, 4, 8), 3e38)
    assert torch.isinf(large.sum())
    activations.check_window(large, 0, "it")
    for value in (float("nan"), float("inf"), float("-inf")):
        broken = large.clone()
        broken[0, 2, 3] = value
        with pytest.raises(UserError, match="calibration window 1: expected finite numbers in it"):
            activations.check_window(broken, 0, "it")
    # Infinities of both signs, and one that a sum of small numbers shows.
    with pytest.raises(UserError, match="an infinite number"):
        activations.check_window(torch.tensor([1.0, float("inf"), -float("inf")]), 0, "it")


def test_overflow_names_the_layer(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    def overflow(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] *= 1e38
        tensors["model.layers.1.mlp.gate_proj.weight"] *= 1e3

    model = damaged(tiny("llama"), tmp_path, overflow)
    with pytest.raises(UserError, match=r"window 1: .*the inputs of model\.layers\.1\.mlp\.down_proj"):
        go(model, WANDA)


def test_dead_channels_and_constant_layers(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    def kill(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.input_layernorm.weight"][7] = 0
        tensors["model.layers.0.mlp.gate_proj.weight"].fill_(0)
        tensors["model.layers.1.mlp.up_proj.weight"].fill_(0.25)

    model = damaged(tiny("llama"), tmp_path, kill)
    for number, wanted in enumerate(([WANDA, ROUND], [{"prune": {"method": "sparsegpt", "pattern": "2:4"}}])):
        out, _ = go(model, *wanted, out=f"run{number}")
        stored = open_checkpoint(out / "model")
        for name in stored.names():
            tensor = stored.tensor(name)
            assert not tensor.is_floating_point() or torch.isfinite(tensor).all()


def test_rows_that_no_group_divides_are_left_alone_and_pruned(tiny: Tiny, go: Any) -> None:
    model = tiny("llama", intermediate_size=200)
    out, facts = go(model, WANDA, ROUND)
    assert len(facts.layers) == 12
    why = {entry.layer: entry.why for entry in facts.left_alone}
    assert "200 weights are no multiple of" in why["model.layers.*.mlp.down_proj.weight (2)"]
    left = open_checkpoint(out / "model").tensor("model.layers.0.mlp.down_proj.weight")
    assert torch.equal((left == 0).sum(1), torch.full((64,), 100))


def test_a_disk_that_fills_keeps_the_work(tiny: Tiny, go: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", num_hidden_layers=4)
    sync = files.sync

    def full(file: Any) -> None:
        if "inputs-00003" in str(file.name):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(UserError) as caught:
        go(model, WANDA, ROUND)
    sentence = str(caught.value)
    assert (
        "inputs-00003.bin: no space left on the device" in sentence and "out.partial is kept for --resume" in sentence
    )
    monkeypatch.undo()
    kept = {path.name for path in (tmp_path / "out.partial").iterdir()}
    assert "inputs-00002.bin" in kept and not any(name.endswith(".tmp") for name in kept)
    out, _ = go(model, WANDA, ROUND, resume=True)
    straight, _ = go(model, WANDA, ROUND, out="straight")
    assert digest(out) == digest(straight)


def test_resume_takes_the_inputs_as_they_were_saved(
    tiny: Tiny, go: Any, spy: Spy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = spy.apply

    def cut(block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        if block.number == 1:
            raise RuntimeError("power cut")
        return apply(block, statistics, inputs)

    monkeypatch.setattr(spy, "apply", cut)
    with pytest.raises(RuntimeError, match="power cut"):
        go(tiny("llama"), WANDA)
    saved = np.fromfile(tmp_path / "out.partial" / "inputs-00001.bin", "<f4")
    monkeypatch.setattr(spy, "apply", apply)
    calls: list[tuple[str, int]] = []
    for name in ("show", "outputs"):
        monkeypatch.setattr(Inputs, name, counting(name, getattr(Inputs, name), calls))
    go(tiny("llama"), WANDA, resume=True)
    assert calls == [("show", 1)]
    assert np.array_equal(spy.inputs[-1].numpy().ravel(), saved)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seq_len": 16, "eval_tokens": 64}, "calibration.tokens was"),
        ({"samples": 2}, "calibration.samples_requested was 3 and is 2"),
        ({"seed": 4}, "seed was 0 and is 4"),
        ({"threads": 2}, "threads was 1 and is 2"),
    ],
)
def test_resume_refuses_what_has_changed(
    tiny: Tiny, go: Any, tmp_path: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch, change: Any, expected: str
) -> None:
    def cut(*given: Any) -> None:
        raise RuntimeError("power cut")

    threads = torch.get_num_threads()
    monkeypatch.setattr(spy, "apply", cut)
    try:
        with pytest.raises(RuntimeError, match="power cut"):
            go(tiny("llama"), WANDA, threads=1)
        before = sorted((tmp_path / "out.partial").iterdir())
        with pytest.raises(UserError, match="--resume needs what the run was started with") as caught:
            go(tiny("llama"), WANDA, resume=True, **{"threads": 1} | change)
    finally:
        torch.set_num_threads(threads)
    assert expected in str(caught.value)
    assert sorted((tmp_path / "out.partial").iterdir()) == before


def test_resume_refuses_other_text_and_other_weights(
    tiny: Tiny, go: Any, tmp_path: Path, text: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*given: Any) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(spy, "apply", cut)
    model = damaged(tiny("llama"), tmp_path, lambda tensors: None)
    with pytest.raises(RuntimeError, match="power cut"):
        go(model, WANDA)
    kept = text.read_text()
    text.write_text(kept.replace("value", "thing"))
    with pytest.raises(UserError, match=r"calibration\.corpus was"):
        go(model, WANDA, resume=True)
    text.write_text(kept)
    shutil.rmtree(model)
    damaged(tiny("llama"), tmp_path, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].mul_(1.01))
    with pytest.raises(UserError, match=r"model\.files\.model\.safetensors was"):
        go(model, WANDA, resume=True)


def test_what_does_not_go_together_is_said_before_the_work(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="make two runs"):
        go(tiny("llama"), {"prune": {"method": "width", "share": 0.25}}, ROUND)
    assert not (tmp_path / "out.partial").exists()


def test_modules_that_are_not_linear_are_not_touched(tiny: Tiny, go: Any, spy: Spy) -> None:
    go(tiny("mixtral"), WANDA)
    router = "mlp.gate"
    assert router not in spy.blocks[0].linears
    assert all(isinstance(linear, nn.Linear) for linear in spy.blocks[0].linears.values())
