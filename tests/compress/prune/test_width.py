"""Width pruning on tiny models of each family: a smaller checkpoint that transformers loads and that computes what the
large one does with the refitted layers and nothing from what was removed."""

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.errors import UserError
from compress.prune import width
from compress.prune.width import DOWN_PROJ, O_PROJ, Sizes
from runtime.checkpoints.architecture import describe

KINDS = ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma"]
TEXT = torch.randint(0, 320, (6, 48), generator=torch.Generator().manual_seed(0))


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


def block_of(tensors: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{number}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def shapes_of(tensors: dict[str, Tensor]) -> tuple[dict[str, tuple[int, ...]], int]:
    outside = sum(tensor.numel() for name, tensor in tensors.items() if ".layers." not in name)
    return {path: tuple(tensor.shape) for path, tensor in block_of(tensors, 0).items()}, outside


@torch.inference_mode()
def capture(path: Path) -> list[dict[str, Tensor]]:
    """Per block the Hessians that width pruning needs."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found: list[dict[str, Tensor]] = [{} for _ in model.model.layers]
    for number, layer in enumerate(model.model.layers):
        for name in (O_PROJ, DOWN_PROJ):

            def hook(module: Any, args: Any, number: int = number, name: str = name) -> None:
                x = args[0].flatten(0, -2)
                found[number][name] = x.T @ x / len(x)

            layer.get_submodule(name).register_forward_pre_hook(hook)
    model(TEXT)
    return found


@torch.inference_mode()
def logits(path: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return model(TEXT).logits


def removal_error(weight: Tensor, hessian: Tensor, kept: Tensor, now: Tensor) -> float:
    """Relative output error of `now` (N, kept) in place of the weight (N, K), in float64."""
    wide, h = weight.double(), hessian.double()
    lost = wide.index_add(1, kept, now.double(), alpha=-1)
    return float((((lost @ h) * lost).sum() / ((wide @ h) * wide).sum()).sqrt())


def save(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_the_smaller_model_is_the_large_one_without_what_was_removed(
    kind: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny(kind)
    config, tensors = read(path)
    block, outside = shapes_of(tensors)
    before, after = width.sizes(config), width.shrink(config, block, outside, 0.5)
    assert (after.heads, after.kv_heads, after.head_dim) == (2, 1, before.head_dim)
    assert 0 < after.intermediate < 192
    small, large = dict(tensors), dict(tensors)
    for number, found in enumerate(capture(path)):
        whole = block_of(tensors, number)
        made = width.narrow(whole, found, before, after)
        for name, tensor in made.items():
            small[f"model.layers.{number}.{name}"] = tensor
        for name, size, keep in ((O_PROJ, before.group, after.kv_heads), (DOWN_PROJ, 1, after.intermediate)):
            weight, hessian, fitted = whole[f"{name}.weight"], found[name], made[f"{name}.weight"]
            among = width.members(width.choose(weight, hessian, size, keep), size)
            assert fitted.shape[1] == len(among) == size * keep
            plain = removal_error(weight, hessian, among, weight[:, among])
            assert removal_error(weight, hessian, among, fitted) < 0.98 * plain
            # At its old size the refitted layer reads nothing of what was removed.
            large[f"model.layers.{number}.{name}.weight"] = torch.zeros_like(weight).index_copy_(1, among, fitted)
    assert sum(t.numel() for t in block_of(small, 0).values()) <= 0.5 * sum(
        torch.Size(s).numel() for s in block.values()
    )
    smaller = width.narrow_config(config, after)
    known = describe(smaller)
    assert known and (known.heads, known.kv_heads, known.intermediate) == (2, 1, after.intermediate)
    found, expected = logits(save(tmp_path / "small", smaller, small)), logits(save(tmp_path / "large", config, large))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (expected - logits(path)).abs().max() > 1e-2 * expected.abs().max()


def test_dtypes_stay_and_a_part_of_the_same_size_is_untouched(tiny: Callable[..., Path]) -> None:
    path = tiny("llama")
    config, tensors = read(path)
    before = width.sizes(config)
    after = Sizes(before.heads, before.kv_heads, before.head_dim, 96)
    block = {name: tensor.bfloat16() for name, tensor in block_of(tensors, 1).items()}
    hessian = capture(path)[1][DOWN_PROJ]
    made = width.narrow(block, {DOWN_PROJ: hessian}, before, after)
    assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
    assert all(torch.equal(made[n], block[n]) for n in block if not n.startswith("mlp"))
    assert made[f"{DOWN_PROJ}.weight"].shape == (64, 96)
    chosen = [
        width.choose(block_of(tensors, number)[f"{DOWN_PROJ}.weight"], found[DOWN_PROJ], 1, 96)
        for number, found in enumerate(capture(path)[:2])
    ]
    assert not torch.equal(*chosen)  # each block has its own best


# name: (configuration, whether kv heads can go)
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "TinyLlama 1.1B": (
        {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
         "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000},
        False,  # 24 heads do not divide 2048
    ),
    "Llama 2 13B": (
        {"model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
         "num_attention_heads": 40, "num_key_value_heads": 40, "vocab_size": 32000},
        True,  # 32 do divide 5120
    ),
    "Mistral 7B": (
        {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
        True,
    ),
    "Qwen2 0.5B": (
        {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
        False,
    ),
    "Phi-3 mini": (
        {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "pad_token_id": 0},
        True,
    ),
    "Gemma 2B": (
        {"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
         "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256000},
        False,
    ),
    "the pair's target": (
        {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": True},
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MODELS))
def test_a_quarter_of_the_blocks_and_a_fifth_of_the_whole(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config, attention = MODELS[name]
    layers = config["num_hidden_layers"]

    def count(config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], int]:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**config, "num_hidden_layers": 1}))
        named = dict(model.named_parameters())
        prefix = "model.layers.0."
        block = {k.removeprefix(prefix): tuple(v.shape) for k, v in named.items() if k.startswith(prefix)}
        return block, sum(v.numel() for k, v in named.items() if not k.startswith(prefix))

    block, outside = count(config)
    after = width.shrink(config, block, outside, 0.25)
    smaller, same = count(width.narrow_config(config, after))
    assert same == outside
    was, now = (sum(torch.Size(shape).numel() for shape in shapes.values()) for shapes in (block, smaller))
    assert 0.25 <= 1 - now / was < 0.32
    assert 1 - (layers * now + outside) / (layers * was + outside) >= 0.2
    assert after.intermediate % 128 == 0
    kv_heads = config["num_key_value_heads"]
    assert (after.kv_heads < kv_heads) == attention
    assert 0.75 * kv_heads <= after.kv_heads
    assert after.heads / after.kv_heads == config["num_attention_heads"] / kv_heads


def test_where_the_embedding_is_most_of_the_model_blocks_give_no_more_than_a_quarter_over() -> None:
    config, _ = MODELS["the pair's target"]
    block = {
        "mlp.up_proj.weight": (1536, 512),
        "mlp.down_proj.weight": (512, 1536),
        "mlp.gate_proj.weight": (1536, 512),
    }
    assert width.shrink(config, block, 10**9, 0.25).intermediate == 1024  # 31.25 %, and on to a multiple of 128
    assert width.shrink(config, block, 0, 0.25).intermediate == 1152


def test_what_cannot_be_narrowed_is_said(tiny: Callable[..., Path]) -> None:
    config, tensors = read(tiny("llama"))
    block, outside = shapes_of(tensors)
    with pytest.raises(UserError, match="mixtral"):
        width.sizes(read(tiny("mixtral"))[0])
    with pytest.raises(UserError, match="gpt2"):
        width.sizes(read(tiny("gpt2"))[0])
    with pytest.raises(UserError, match="ask for less"):
        width.shrink(MODELS["Gemma 2B"][0], {**block, "self_attn.q_proj.weight": (10**5, 10)}, outside, 0.75)
    before = width.sizes(config)
    whole, after = block_of(tensors, 0), Sizes(2, 1, before.head_dim, 96)
    good = {O_PROJ: torch.eye(64), DOWN_PROJ: torch.eye(192)}
    assert width.narrow(whole, good, before, after)[f"{O_PROJ}.weight"].shape == (64, 32)
    with pytest.raises(ValueError, match="Hessian holds NaN"):
        width.narrow(whole, {**good, O_PROJ: torch.full((64, 64), torch.nan)}, before, after)
    with pytest.raises(ValueError, match=r"mlp\.down_proj: the weight holds NaN"):
        width.narrow({**whole, "mlp.down_proj.weight": torch.full((64, 192), torch.nan)}, good, before, after)
    with pytest.raises(ValueError, match="expected 64 inputs, found 32"):
        width.narrow({**whole, "self_attn.o_proj.weight": torch.ones(64, 32)}, good, before, after)
    with pytest.raises(ValueError, match=r"k_proj\.weight: expected 32 rows, found 64"):
        width.narrow({**whole, "self_attn.k_proj.weight": torch.ones(64, 64)}, good, before, after)


def layer(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4 * columns, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs / len(inputs)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_first_group_to_go_is_the_one_whose_refit_loses_least(size: int, seed: int) -> None:
    weight, hessian = layer(10, 12, seed)
    count = 12 // size
    errors = []
    for kept in combinations(range(count), count - 1):
        among = width.members(torch.tensor(kept), size)
        fitted = width.refit(weight, hessian, among, damping=1e-6)
        errors.append((removal_error(weight, hessian, among, fitted), kept))
    assert tuple(width.choose(weight, hessian, size, count - 1, damping=1e-6).tolist()) == min(errors)[1]


def test_greedy_choice_is_near_the_best_of_all_and_below_the_worst() -> None:
    weight, hessian = layer(10, 10, 9)
    errors = {
        kept: removal_error(weight, hessian, torch.tensor(kept), width.refit(weight, hessian, torch.tensor(kept)))
        for kept in combinations(range(10), 6)
    }
    found = errors[tuple(width.choose(weight, hessian, 1, 6).tolist())]
    assert found <= sorted(errors.values())[10] < np.median(list(errors.values()))


def test_of_two_channels_that_say_the_same_one_goes() -> None:
    weight, _ = layer(8, 6, 10)
    mix = torch.eye(6)
    mix[:, 4] = mix[:, 1]  # channel 4 repeats channel 1
    hessian = mix.T @ mix
    assert sorted({1, 4} & set(width.choose(weight, hessian, 1, 5).tolist())) in ([1], [4])
    assert {1, 4} & set(width.choose(weight, hessian, 1, 4).tolist())  # the other then carries both, and stays
    kept = torch.tensor([0, 1, 2, 3, 5])
    fitted = width.refit(weight, hessian, kept, damping=1e-6)
    assert torch.allclose(fitted[:, 1], weight[:, 1] + weight[:, 4], atol=1e-3)


def test_refit_is_least_squares_on_the_inputs() -> None:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(200, 24, generator=generator) @ torch.randn(24, 24, generator=generator)
    weight, kept = torch.randn(9, 24, generator=generator), torch.arange(0, 24, 2)
    fitted = width.refit(weight, inputs.T @ inputs / 200, kept, damping=0.0)
    expected = np.linalg.lstsq(inputs[:, kept].double().numpy(), (inputs @ weight.T).double().numpy(), rcond=None)[0].T
    assert np.abs(fitted.numpy() - expected).max() < 1e-3 * np.abs(expected).max()


def test_dead_and_absent_inputs() -> None:
    weight, hessian = layer(6, 16, 12)
    hessian[3] = hessian[:, 3] = 0
    assert 3 not in width.choose(weight, hessian, 1, 15).tolist()
    kept = torch.arange(8)
    fitted = width.refit(weight, hessian, kept)
    assert torch.allclose(fitted[:, 3], weight[:, 3], rtol=1e-4)  # dead now, and no reason to change it
    assert torch.allclose(width.refit(weight, torch.zeros(16, 16), kept), weight[:, :8])
    assert len(width.choose(weight, torch.zeros(16, 16), 4, 2)) == 2
    flat = torch.ones(16, 16)  # rank 1
    assert torch.isfinite(width.refit(weight, flat, kept, damping=0.0)).all()
    with pytest.raises(ValueError, match="cannot keep 5 groups of 4"):
        width.choose(weight, hessian, 4, 5)
