"""The calibrated pass: what goes into each block, what stages see, what is written, and what is refused."""

import errno
import json
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from calib.moments import Moments, Wants
from compress.artifact import files, manifest
from compress.calibration import activations
from compress.calibration.activations import Activations, Inputs
from compress.errors import UserError
from compress.model.block import Block, Statistics
from compress.pipeline import compress, forecast, passes
from compress.records import RunFacts
from compress.stages import quantize
from compress.stages.quantize import RoundToNearest
from runtime.checkpoints.open import open_checkpoint

Tiny = Callable[..., Path]
WANDA = {"prune": {"method": "wanda", "sparsity": 0.5}}
ROUND = {"quantize": {"scheme": "int4", "group_size": 32}}


class Spy:
    """A stage that keeps what it was shown, and wants a Hessian of everything."""

    def __init__(self, wants: Wants | None = None):
        self.wanted = wants or Wants(hessian=True, norms=True)
        self.statistics: list[dict[str, Moments]] = []
        self.inputs: list[Tensor] = []
        self.blocks: list[Block] = []
        self.tokens = torch.empty(0)

    def wants(self, block: Block) -> Mapping[str, Wants]:
        return dict.fromkeys(block.linears, self.wanted)

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        assert inputs is not None
        self.statistics.append(dict(statistics))
        self.inputs.append(torch.cat(list(inputs.windows())))
        self.blocks.append(block)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "code.txt"
    path.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))
    return path


@pytest.fixture
def go(text: Path, tmp_path: Path) -> Callable[..., tuple[Path, RunFacts]]:
    def run_it(model: Path, *wanted: dict[str, Any], out: str = "out", **options: Any) -> tuple[Path, RunFacts]:
        recipe = tmp_path / "own.yaml"
        recipe.write_text(json.dumps({"stages": list(wanted)}))
        kept: list[RunFacts] = []

        def report(facts: RunFacts, *rest: Any) -> dict[str, Any]:
            kept.append(facts)
            return {}

        small = {"calib": str(text), "seq_len": 32, "eval_tokens": 64, "samples": 3} | options
        compress(model, recipe, tmp_path / out, report=report, **small)
        return tmp_path / out, kept[0]

    return run_it


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Stands before the recipe's own stages."""
    found, make, work = Spy(), quantize.make_stages, passes.plan_blocks

    def kept(*given: Any) -> Any:
        found.tokens = given[3]
        return work(*given)

    monkeypatch.setattr(passes, "plan_blocks", kept)
    monkeypatch.setattr(passes, "make_stages", lambda *given: [found, *make(*given)])
    return found


def changed(model: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    copy = folder / "changed"
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def hidden(model: Path, tokens: Tensor, block: int) -> Tensor:
    """What goes into a block of the whole model."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        found: Tensor = loaded(tokens, output_hidden_states=True, use_cache=False).hidden_states[block]
    return found


def digest(out: Path) -> bytes:
    return (out / manifest.NAME).read_bytes()


def test_a_block_reads_what_the_compressed_blocks_before_it_give(tiny: Tiny, go: Any, spy: Spy) -> None:
    out, facts = go(tiny("mistral"), WANDA, ROUND)
    assert len(facts.layers) == 14
    torch.testing.assert_close(spy.inputs[0], hidden(tiny("mistral"), spy.tokens, 0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(spy.inputs[1], hidden(out / "model", spy.tokens, 1), rtol=1e-3, atol=1e-3)
    far = (spy.inputs[1] - hidden(tiny("mistral"), spy.tokens, 1)).norm() / spy.inputs[1].norm()
    assert far > 0.05


def counting(name: str, method: Any, calls: list[tuple[str, int]]) -> Any:
    def counted(self: Inputs, block: Block) -> Any:
        calls.append((name, block.number))
        return method(self, block)

    return counted


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

    model = changed(tiny("llama"), tmp_path, overflow)
    with pytest.raises(UserError, match=r"window 1: .*the inputs of model\.layers\.1\.mlp\.down_proj"):
        go(model, WANDA)


def test_dead_channels_and_constant_layers(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    def kill(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.input_layernorm.weight"][7] = 0
        tensors["model.layers.0.mlp.gate_proj.weight"].fill_(0)
        tensors["model.layers.1.mlp.up_proj.weight"].fill_(0.25)

    model = changed(tiny("llama"), tmp_path, kill)
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
    model = changed(tiny("llama"), tmp_path, lambda tensors: None)
    with pytest.raises(RuntimeError, match="power cut"):
        go(model, WANDA)
    kept = text.read_text()
    text.write_text(kept.replace("value", "thing"))
    with pytest.raises(UserError, match=r"calibration\.corpus was"):
        go(model, WANDA, resume=True)
    text.write_text(kept)
    shutil.rmtree(model)
    changed(tiny("llama"), tmp_path, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].mul_(1.01))
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

    model = changed(tiny("llama", num_hidden_layers=4), tmp_path, quieten)
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
