"""A fold changes no output of a decoder layer, for every family; and refuses what it does not know."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from compress.errors import UserError
from compress.quantize import folding

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
QWEN_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
SHARED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 16,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "smollm3": {},
    "granite": {"residual_multiplier": 0.5},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "ministral": {"head_dim": 12},
    "ministral3": {"head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "internlm3": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "iquestcoder": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "helium": {"head_dim": 12},
    "hunyuan_v1_dense": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mellum": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "cwm": {"head_dim": 16},
    "hyperclovax": {"head_dim": 16},
    "granite_swa": {"head_dim": 16},
    "vaultgemma": {"head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "glm4_moe": SHARED,
    "dots1": SHARED,
    "ernie4_5_moe": SHARED
    | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 1},
    "exaone_moe": SHARED
    | {"num_experts": 4, "num_shared_experts": 1, "is_moe_layer": [True], "mlp_layer_types": ["sparse"]},
    "solar_open": SHARED,
    "hy_v3": SHARED | {"num_experts": 4, "num_shared_experts": 1, "mlp_layer_types": ["sparse"]},
    "deepseek_v2": SHARED | LATENT | {"head_dim": 8},
    "deepseek_v3": SHARED | LATENT | {"head_dim": 8},
    "glm4_moe_lite": SHARED | LATENT | {"head_dim": 8, "mlp_layer_types": ["sparse"]},
    "youtu": LATENT | {"head_dim": 8},
    "qwen3_next": DELTA | QWEN_MOE,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | QWEN_MOE,
}
MIXTURES = tuple(kind for kind, keys in FAMILIES.items() if any("experts_per_tok" in key for key in keys))


class Expert(nn.Module):
    """One expert taken out of transformers' fused parameters."""

    def __init__(self, gate_up: Tensor, down: Tensor, act: Any):
        super().__init__()
        inner = down.shape[1]
        self.act = act
        self.gate_proj = linear(gate_up[:inner])
        self.up_proj = linear(gate_up[inner:])
        self.down_proj = linear(down)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return y


class Experts(nn.ModuleList):
    """Experts as separate linear layers, as blocks that are compressed have them."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self):
            token, place = torch.where(chosen == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return out


def linear(weight: Tensor) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight.data = weight.detach().clone()
    return module


def random_model(kind: str, split: bool = True, **changes: Any) -> Any:
    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **SHAPE | FAMILIES[kind] | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * (0.3 if weight.dim() > 1 else 0.5))
    layer = model.model.layers[0]
    if split and kind in MIXTURES:
        fused = layer.mlp.experts
        pairs = zip(fused.gate_up_proj, fused.down_proj, strict=True)
        layer.mlp.experts = Experts(Expert(gate_up, down, fused.act_fn) for gate_up, down in pairs)
    return model


@torch.no_grad()
def block_output(model: Any) -> Tensor:
    """(1, 24, hidden) what the decoder layer adds to and returns."""
    caught: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        caught.append(output[0] if isinstance(output, tuple) else output)

    handle = model.model.layers[0].register_forward_hook(keep)
    model(torch.arange(24).view(1, -1), use_cache=False)
    handle.remove()
    return caught[0]


@torch.no_grad()
def fed_inputs(model: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    caught: dict[str, Tensor] = {}
    layer = model.model.layers[0]

    def keep(name: str) -> Any:
        return lambda module, inputs: caught.__setitem__(name, inputs[0].reshape(-1, inputs[0].shape[-1]))

    handles = [layer.get_submodule(name).register_forward_pre_hook(keep(name)) for name in names]
    model(torch.arange(24).view(1, -1), use_cache=False)
    for handle in handles:
        handle.remove()
    return caught


def random_factor(layer: nn.Module, fold: folding.Fold, seed: int = 1) -> Tensor:
    channels = layer.get_parameter(f"{fold.linears[0]}.weight").shape[1]
    generator = torch.Generator().manual_seed(seed)
    own = torch.exp(torch.randn(channels // fold.sharing, generator=generator))
    return folding.spread(fold, own)


FULL = {"layer_types": ["full_attention"]}


@pytest.mark.parametrize(
    ("kind", "changes"), [*((kind, {}) for kind in FAMILIES), ("qwen3_next", FULL), ("qwen3_5_text", FULL)]
)
def test_no_fold_changes_the_block(kind: str, changes: dict[str, Any]) -> None:
    model = random_model(kind, **changes)
    layer = model.model.layers[0]
    before = block_output(model)
    for fold in folding.folds(layer, kind):
        inputs = fed_inputs(model, fold.linears)
        factor = random_factor(layer, fold)
        folding.apply(layer, fold, factor)
        after = block_output(model)
        assert (after - before).abs().max() <= 1e-5 * before.abs().max(), fold
        # And it did something: the layers see inputs divided by the factor.
        for name, smaller in fed_inputs(model, fold.linears).items():
            torch.testing.assert_close(smaller, inputs[name] / factor, rtol=1e-4, atol=1e-5)


def test_folds_of_a_llama_layer_feed_every_linear_layer_once() -> None:
    layer = random_model("llama").model.layers[0]
    found = folding.folds(layer, "llama")
    assert [fold.previous for fold in found] == [
        "input_layernorm",
        "self_attn.v_proj",
        "post_attention_layernorm",
        "mlp.up_proj",
    ]
    fed = [name for fold in found for name in fold.linears]
    assert sorted(fed) == sorted(name for name, m in layer.named_modules() if isinstance(m, nn.Linear))
    assert found[1].sharing == 2 and found[1].head_dim == 12


@pytest.mark.parametrize("kind", MIXTURES)
def test_routers_and_experts_all_read_the_norm(kind: str) -> None:
    layer = random_model(kind).model.layers[0]
    fold = next(f for f in folding.folds(layer, kind) if f.previous == "post_attention_layernorm")
    assert len([name for name in fold.linears if ".experts." in name]) == 2 * 4
    assert "mlp.gate.weight" in fold.others
    assert ("mlp.shared_expert_gate.weight" in fold.others) == ("shared_expert_intermediate_size" in FAMILIES[kind])


def test_a_router_left_out_would_change_the_block() -> None:
    """The positive of the routers' test: without compensation the same fold is no fold."""
    model = random_model("mixtral")
    layer = model.model.layers[0]
    before = block_output(model)
    fold = next(f for f in folding.folds(layer, "mixtral") if f.linears[0].startswith("mlp"))
    router = layer.mlp.gate.weight.detach().clone()
    folding.apply(layer, fold, random_factor(layer, fold))
    layer.mlp.gate.weight.data = router
    assert (block_output(model) - before).abs().max() > 1e-2


def test_fused_experts_are_multiplied_though_only_the_shared_expert_is_judged() -> None:
    model = random_model("qwen2_moe", split=False)
    layer = model.model.layers[0]
    before = block_output(model)
    fold = next(f for f in folding.folds(layer, "qwen2_moe") if f.linears[0].startswith("mlp"))
    assert fold.linears == ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    assert "mlp.experts.gate_up_proj" in fold.others
    folding.apply(layer, fold, random_factor(layer, fold))
    assert (block_output(model) - before).abs().max() <= 1e-5 * before.abs().max()


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_storable_factor_leaves_the_norm_exact_in_the_file(kind: str, dtype: torch.dtype) -> None:
    model = random_model(kind)
    layer = model.model.layers[0]
    layer.input_layernorm.weight.data[3] = -folding.NORM_OFFSET[kind]  # a channel that the norm makes 0
    before = block_output(model)
    fold = folding.folds(layer, kind)[0]
    wished = random_factor(layer, fold)
    factor = folding.storable(layer, fold, wished, dtype)
    assert factor[3] == 1
    folding.apply(layer, fold, factor)
    layer.input_layernorm.weight.data = layer.input_layernorm.weight.data.to(dtype).float()
    assert (block_output(model) - before).abs().max() <= 1e-5 * before.abs().max()
    live = torch.arange(len(factor)) != 3
    # Near Gemma's w = −1 the stored weight has few digits left of 1 + w.
    assert (factor / wished - 1)[live].abs().median() < 2.0**-7
    # The wished factor itself would not have survived the file.
    other = random_model(kind)
    folding.apply(other.model.layers[0], fold, wished)
    norm = other.model.layers[0].input_layernorm
    norm.weight.data = norm.weight.data.to(dtype).float()
    assert (block_output(other) - block_output(random_model(kind))).abs().max() > 1e-4


def test_shared_statistics_are_equal_over_the_query_heads_of_a_value_head() -> None:
    fold = folding.Fold("v", ("o",), sharing=2, head_dim=3)
    statistic = torch.arange(12.0)
    mean = folding.share(fold, statistic).view(2, 2, 3)
    assert torch.equal(mean[:, 0], mean[:, 1])
    assert mean[:, 0].flatten().tolist() == [1.5, 2.5, 3.5, 7.5, 8.5, 9.5]
    assert folding.share(fold, statistic, "max").view(2, 2, 3)[:, 1].flatten().tolist() == [3, 4, 5, 9, 10, 11]
    alone = folding.Fold("v", ("o",))
    assert torch.equal(folding.share(alone, statistic), statistic)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_no_factor_is_refused_before_anything_changes(bad: float) -> None:
    model = random_model("llama")
    layer = model.model.layers[0]
    before = block_output(model)
    fold = folding.folds(layer, "llama")[0]
    factor = random_factor(layer, fold)
    factor[7] = bad
    with pytest.raises(ValueError, match="positive finite"):
        folding.apply(layer, fold, factor)
    assert torch.equal(block_output(model), before)


def test_query_heads_must_share_their_factors() -> None:
    layer = random_model("llama").model.layers[0]
    fold = folding.folds(layer, "llama")[1]
    factor = random_factor(layer, fold)
    folding.apply(layer, fold, factor)
    factor[0] *= 2
    with pytest.raises(ValueError, match="share factors"):
        folding.apply(layer, fold, factor)


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="gpt2"):
        folding.folds(nn.Module(), "gpt2")


def test_an_unknown_reader_is_refused() -> None:
    layer = random_model("llama").model.layers[0]
    layer.mlp.extra = nn.Linear(48, 8)
    with pytest.raises(ValueError, match=r"mlp\.extra"):
        folding.folds(layer, "llama")
