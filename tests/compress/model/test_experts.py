"""Fused experts taken apart: the same outputs, counts of tokens, and the names that checkpoints use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compress.errors import UserError
from compress.model.experts import UnfusedExperts, counted, records, starved, unfuse
from compress.model.names import Names
from compress.recipe.block_stages import Experts

EXPERTS = 4
_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
}
KINDS = ("mixtral", "qwen2_moe", "qwen3_moe")


def make(kind: str, device: str = "cpu") -> Any:
    """A random mixture of experts of two layers whose router chooses clearly."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_SHAPE), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape))
    return model


def blocks(model: Any) -> list[nn.Module]:
    return list(model.model.layers)


def tokens(seed: int = 0, length: int = 40) -> Tensor:
    return torch.randint(0, _SHAPE["vocab_size"], (1, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def logits(model: Any, text: Tensor) -> Tensor:
    found: Tensor = model(text).logits
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_outputs_stay(kind: str) -> None:
    model = make(kind)
    before = logits(model, tokens())
    assert [unfuse(block) for block in blocks(model)] == [("mlp.experts",)] * 2
    names = {name for name, module in model.model.layers[1].named_modules() if isinstance(module, nn.Linear)}
    wanted = {f"mlp.experts.{n}.{part}_proj" for n in range(EXPERTS) for part in ("gate", "up", "down")}
    assert wanted <= names and len([n for n in names if ".experts." in n]) == len(wanted)
    torch.testing.assert_close(logits(model, tokens()), before, rtol=1e-4, atol=1e-5)
    # One expert's own weight matters, so the comparison above could have failed.
    with torch.no_grad():
        model.model.layers[0].mlp.experts[1].up_proj.weight.zero_()
    assert (logits(model, tokens()) - before).abs().max() > 1e-2


def test_a_dense_layer_has_nothing_to_unfuse() -> None:
    layer = nn.Sequential(nn.Linear(4, 4))
    assert unfuse(layer) == () and isinstance(layer[0], nn.Linear)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_counted_as_the_router_sends_them(kind: str) -> None:
    model = make(kind)
    routed = torch.zeros(EXPERTS, dtype=torch.int64)

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        for index in given[1].flatten().tolist():
            routed[index] += 1

    model.model.layers[1].mlp.experts.register_forward_pre_hook(note)
    logits(model, tokens())
    unfuse(blocks(model)[1])
    with counted(blocks(model)[1]) as counts:
        logits(model, tokens())
    assert counts == {f"mlp.experts.{n}": int(routed[n]) for n in range(EXPERTS)}
    assert sum(counts.values()) == 2 * tokens().numel() and len(set(counts.values())) > 1
    logits(model, tokens())  # what runs later is not counted
    assert counts == {f"mlp.experts.{n}": int(routed[n]) for n in range(EXPERTS)}


def seen(block: nn.Module) -> dict[str, int]:
    """Rows that hooks on each linear layer are shown from now on."""
    rows: dict[str, int] = {}
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) and ".experts." in name:
            rows[name] = 0

            def hook(_: nn.Module, given: tuple[Tensor, ...], name: str = name) -> None:
                rows[name] += given[0].shape[0]

            module.register_forward_pre_hook(hook)
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_are_for_statistics_only(kind: str) -> None:
    model = make(kind)
    block = blocks(model)[0]
    unfuse(block)
    before = logits(model, tokens())
    rows = seen(block)
    with counted(block) as counts:
        logits(model, tokens())
    assert rows == {name: counts[name.rpartition(".")[0]] for name in rows}
    rows.update(dict.fromkeys(rows, 0))
    with counted(block, all_tokens=["mlp.experts.2"]) as again:
        shown = logits(model, tokens())
    assert torch.equal(shown, before)
    assert again == counts
    for name, count in rows.items():
        path = name.rpartition(".")[0]
        assert count == (tokens().numel() if path == "mlp.experts.2" else counts[path])
    rows.update(dict.fromkeys(rows, 0))
    logits(model, tokens())
    assert rows["mlp.experts.2.up_proj"] == counts["mlp.experts.2"]


def test_experts_that_are_not_there() -> None:
    model = make("mixtral")
    unfuse(blocks(model)[0])
    with pytest.raises(ValueError, match=r"mlp\.experts\.4"), counted(blocks(model)[0], ["mlp.experts.4"]):
        pass


def test_starved_experts_are_named_and_handled_as_the_recipe_says() -> None:
    counts = {"mlp.experts.0": 300, "mlp.experts.1": 255, "mlp.experts.2": 256, "mlp.experts.10": 0}
    assert starved(counts, 256) == ("mlp.experts.1", "mlp.experts.10")
    assert starved(counts, 0) == ()
    shown = [
        (r.block, r.expert, r.tokens, r.handled)
        for r in records(5, counts, Experts(expert_fallback="all-tokens", min_tokens=256))
    ]
    assert shown == [
        (5, 0, 300, "calibrated"),
        (5, 1, 255, "all tokens"),
        (5, 2, 256, "calibrated"),
        (5, 10, 0, "all tokens"),
    ]
    assert [r.handled for r in records(5, counts, Experts(expert_fallback="rtn", min_tokens=256))][
        1
    ] == "rounded to nearest"


def test_an_expert_that_the_router_never_chooses() -> None:
    model = make("mixtral")
    block = blocks(model)[0]
    unfuse(block)
    with torch.no_grad():  # the same score everywhere: the first two win every tie
        block.mlp.gate.weight.zero_()  # type: ignore[union-attr]
    rows = seen(block)
    with counted(block) as counts:
        logits(model, tokens())
    never = starved(counts, 1)
    assert len(never) == 2 and all(rows[f"{path}.up_proj"] == 0 for path in never)
    with counted(block, never):
        logits(model, tokens())
    assert all(rows[f"{path}.{part}_proj"] == tokens().numel() for path in never for part in ("gate", "up", "down"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_without_memory_takes_the_checkpoint_s_tensors(kind: str, tmp_path: Path) -> None:
    """What the pipeline does: build on the meta device, unfuse, load single experts by the checkpoint's names."""
    model = make(kind)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    apart = Names(model)
    names = {path: name.removesuffix(".weight") for name in stored if (path := apart.place(name).expert) is not None}
    assert len(names) == 2 * 3 * EXPERTS
    empty = blocks(make(kind, device="meta"))[0]
    unfuse(empty)
    prefix = "model.layers.0."
    state = {path.removeprefix(prefix): stored[f"{name}.weight"] for path, name in names.items() if prefix in path}
    state = {f"{path}.weight": weight for path, weight in state.items()}
    missing, unexpected = empty.load_state_dict(state, strict=False, assign=True)
    assert not unexpected and not [name for name in missing if ".experts." in name]
    experts = empty.get_submodule("mlp.experts")
    assert isinstance(experts, UnfusedExperts)
    x, index = torch.randn(7, 32), torch.randint(0, EXPERTS, (7, 2))
    weights = torch.rand(7, 2)
    with torch.inference_mode():
        expected = model.model.layers[0].mlp.experts(x, index, weights)
        torch.testing.assert_close(experts(x, index, weights), expected, rtol=1e-4, atol=1e-5)


def without_gates() -> Any:
    """A model of two mixtures without gates, and of the parameters that all of them need."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    given = {"layers_block_type": ["moe", "full_attention", "moe"], "moe_shared_expert_intermediate_size": 40}
    config = AutoConfig.for_model("nemotron_h", **_SHAPE, **given, n_routed_experts=EXPERTS)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape))
    return model


def test_experts_without_a_gate(tmp_path: Path) -> None:
    """Two layers each, in the model and by the names of the checkpoint; and the outputs stay."""
    model = without_gates()
    before = logits(model, tokens())
    model.save_pretrained(tmp_path)
    apart = Names(model)
    paths = {apart.place(name).expert for name in load_file(tmp_path / "model.safetensors")} - {None}
    wanted = {f"mixer.experts.{n}.{part}_proj" for n in range(EXPERTS) for part in ("up", "down")}
    assert paths == {f"model.layers.{layer}.{path}" for layer in (0, 2) for path in wanted}
    assert [unfuse(block) for block in blocks(model)] == [("mixer.experts",), (), ("mixer.experts",)]
    names = {name for name, module in blocks(model)[0].named_modules() if isinstance(module, nn.Linear)}
    assert {name for name in names if ".experts." in name} == wanted
    rows = seen(blocks(model)[0])
    with counted(blocks(model)[0], ["mixer.experts.1"]) as counts:
        torch.testing.assert_close(logits(model, tokens()), before, rtol=1e-4, atol=1e-5)
    assert rows["mixer.experts.2.up_proj"] == rows["mixer.experts.2.down_proj"] == counts["mixer.experts.2"]
    assert rows["mixer.experts.1.up_proj"] == tokens().numel()
    with torch.no_grad():
        blocks(model)[2].mixer.experts[1].up_proj.weight.zero_()  # type: ignore[index, union-attr]
    assert (logits(model, tokens()) - before).abs().max() > 1e-3


def test_the_experts_are_views_that_can_be_saved(tmp_path: Path) -> None:
    model = make("mixtral")
    fused = model.model.layers[0].mlp.experts.gate_up_proj
    unfuse(blocks(model)[0])
    expert = model.model.layers[0].mlp.experts[3]
    assert expert.up_proj.weight.data_ptr() == fused[3, expert.up_proj.out_features :].data_ptr()
    state = {name: p.data for name, p in model.model.layers[0].mlp.experts.named_parameters()}
    save_file(state, tmp_path / "one.safetensors")
    assert torch.equal(load_file(tmp_path / "one.safetensors")["3.up_proj.weight"], expert.up_proj.weight)


class Clamped(nn.Module):
    """Looks like the others, and limits what passes its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 12, 8))
        self.down_proj = nn.Parameter(torch.randn(2, 8, 6))
        self.act_fn = nn.SiLU()

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=7.0)) * up


def with_bias(module: nn.Module) -> None:
    module.register_parameter("down_proj_bias", nn.Parameter(torch.zeros(2, 8)))


def transposed(module: nn.Module) -> None:
    module.down_proj = nn.Parameter(torch.randn(2, 6, 8))


def activating_both(module: nn.Module) -> None:
    module.act_fn = nn.Bilinear(6, 6, 6)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda m: None, "a gate of its own"),
        (activating_both, "a gate of its own"),
        (with_bias, "down_proj_bias"),
        (transposed, r"\(2, 6, 8\)"),
    ],
)
def test_other_forms_are_refused(change: Callable[[nn.Module], None], found: str) -> None:
    block = nn.ModuleDict({"experts": Clamped()})
    change(block["experts"])
    with pytest.raises(UserError, match=f"Clamped: expected experts as .*{found}"):
        unfuse(block)
