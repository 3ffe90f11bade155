"""The published models whose sizes the benchmarks know, by what their config.json says."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from runtime.checkpoints.architecture import Architecture, describe
from runtime.errors import UserError

# Experts that transformers holds in two tensors: a file of packed ones has them one by one.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_WITHOUT_ATTENTION = {"conv", "linear_attention"}


@dataclass(frozen=True)
class Shape:
    """A published architecture: `config` is what its config.json says, with no dtype and no quantisation."""

    name: str
    config: Mapping[str, Any]

    @property
    def architecture(self) -> Architecture:
        """The sizes as the decoder reads them."""
        found = describe(dict(self.config))
        assert found is not None, f"{self.name} is of no family that the decoder runs"
        return found

    def first(self, layers: int | None) -> "Shape":
        """The model of its first layers alone; None: of all.

        Raises UserError where it has fewer, and where none of them has attention, without which its family is not read.
        """
        count = self.config["num_hidden_layers"]
        if layers is None or layers == count:
            return self
        if not 1 <= layers < count:
            raise UserError(f"--layers: {self.name} has {count}, found {layers}")
        kinds = self.config.get("layer_types", ())
        if kinds and set(kinds[:layers]) <= _WITHOUT_ATTENTION:
            least = next(number for number, kind in enumerate(kinds, 1) if kind not in _WITHOUT_ATTENTION)
            raise UserError(f"--layers: the first {layers} of {self.name} have no attention; take {least} or more")
        each = {key: value[:layers] for key, value in self.config.items() if key in ("layer_types", "no_rope_layers")}
        return replace(self, config=MappingProxyType({**self.config, **each, "num_hidden_layers": layers}))

    @cached_property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of a checkpoint's tensors by name, each in its layer's place; experts one by one.

        Those of gpt-oss, which it publishes as mxfp4, stay in two tensors.
        """
        found: dict[str, tuple[int, ...]] = {}
        for name, tensor in _meta_model(self.config).state_dict().items():
            base, last = name.rpartition(".")[::2]
            if tensor.dim() != 3 or last not in _FUSED or self.architecture.model_type == "gpt_oss":
                found[name] = tuple(tensor.shape)
                continue
            parts = _FUSED[last]
            for expert in range(len(tensor)):
                size = (tensor.shape[1] // len(parts), tensor.shape[2])
                found |= {f"{base}.{expert}.{part}.weight": size for part in parts}
        return MappingProxyType(found)

    @cached_property
    def linear(self) -> Mapping[str, tuple[int, int]]:
        """Linear layers of the blocks, by name: (outputs, inputs). What chooses experts or opens a gate is none."""
        model = _meta_model(self.config)
        known = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        a = self.architecture
        # What latent attention makes keys and values of goes into other products: its decoders hold it plain.
        plain = ("lm_head.weight", *(() if a.latent is None else (f"{a.latent.expand}.weight",)))
        return {
            name.removesuffix(".weight"): (shape[0], shape[1])
            for name, shape in self.tensors.items()
            if (name in known or ".experts." in name)
            and len(shape) == 2
            and name.endswith(".weight")
            and not name.endswith(plain)
            and shape[0] > 1
        }


def _meta_model(config: Mapping[str, Any]) -> torch.nn.Module:
    """transformers' model, without memory for its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return model


_COMMON: dict[str, Any] = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_LLAMA: dict[str, Any] = _COMMON | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": _DEFAULT_ROPE,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN2: dict[str, Any] = _COMMON | {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_parameters": _DEFAULT_ROPE | {"rope_theta": 1_000_000.0},
    "use_sliding_window": False,
}
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _config(
    base: dict[str, Any],
    sizes: tuple[int, int, int, int, int, int, int],
    ends: tuple[int, int],
    tied: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """sizes: vocabulary, hidden, MLP, layers, heads, heads of keys and values, positions. ends: ids of bos and eos."""
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    )
    told = {"tie_word_embeddings": tied, "bos_token_id": ends[0], "eos_token_id": ends[1]}
    return base | dict(zip(names, sizes, strict=True)) | told | more


def _family(model_type: str, eps: float, theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    """Of one model of a family each."""
    rope = {"rope_type": "default", "rope_theta": theta}
    return _COMMON | {"model_type": model_type, "rms_norm_eps": eps, "rope_parameters": rope} | more


def _every(count: int, layers: int, first: str, last: str) -> list[str]:
    """The kinds of layers of which each `count`-th is `last`."""
    return [last if (number + 1) % count == 0 else first for number in range(layers)]


def _yarn(theta: float, factor: float, positions: int, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": positions,
    } | more


_WINDOWS = ("sliding_attention", "full_attention")
_LLAMA31: dict[str, Any] = _LLAMA | {"head_dim": 128, "rope_parameters": _LLAMA3_ROPE | {"factor": 8.0}}
_LLAMA3_ENDS = (128_000, 128_001)
_CONFIGS: dict[str, dict[str, Any]] = {
    "tinyllama-1.1b": _config(_LLAMA, (32_000, 2048, 5632, 22, 32, 4, 2048), (1, 2)),
    # 7 to 8 % of the bytes, which with what a forward costs whatever its size makes a tenth of the time.
    "tinyllama-tenth": _config(_LLAMA, (32_000, 768, 2048, 6, 12, 4, 2048), (1, 2)),
    "llama-3.2-1b": _config(
        _LLAMA, (128_256, 2048, 8192, 16, 32, 8, 131_072), _LLAMA3_ENDS, tied=True, rope_parameters=_LLAMA3_ROPE
    ),
    "llama-2-7b": _config(_LLAMA, (32_000, 4096, 11_008, 32, 32, 32, 4096), (1, 2), head_dim=128),
    "llama-3.1-8b": _config(_LLAMA31, (128_256, 4096, 14_336, 32, 32, 8, 131_072), _LLAMA3_ENDS),
    "llama-3.1-8b-tenth": _config(_LLAMA31, (128_256, 2048, 8192, 4, 32, 8, 131_072), _LLAMA3_ENDS, head_dim=64),
    "llama-3.1-70b": _config(_LLAMA31, (128_256, 8192, 28_672, 80, 64, 8, 131_072), _LLAMA3_ENDS),
    "qwen2.5-0.5b": _config(_QWEN2, (151_936, 896, 4864, 24, 14, 2, 32_768), (151_643, 151_643), tied=True),
    "qwen3-4b": _config(
        _QWEN2 | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        (151_936, 2560, 9728, 36, 32, 8, 40_960),
        (151_643, 151_645),
        head_dim=128,
        tied=True,
    ),
    "gemma-3-4b": _config(
        _family("gemma3_text", 1e-6, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256),
        (262_208, 2560, 10_240, 34, 8, 4, 131_072),
        (2, 1),
        tied=True,
        head_dim=256,
        sliding_window=1024,
        layer_types=_every(6, 34, *_WINDOWS),
        rope_parameters={
            "sliding_attention": _DEFAULT_ROPE,
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
    ),
    "qwen3.5-4b": _config(
        _family("qwen3_5_text", 1e-6),
        (248_320, 2560, 9216, 32, 16, 4, 262_144),
        (248_044, 248_044),
        tied=True,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        layer_types=_every(4, 32, "linear_attention", "full_attention"),
        rope_parameters=_DEFAULT_ROPE | {"rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    ),
    "gpt-oss-20b": _config(
        _family("gpt_oss", 1e-5, num_local_experts=32, num_experts_per_tok=4, swiglu_limit=7.0, attention_bias=True),
        (201_088, 2880, 2880, 24, 64, 8, 131_072),
        (199_998, 200_002),
        head_dim=64,
        sliding_window=128,
        layer_types=_every(2, 24, *_WINDOWS),
        rope_parameters=_yarn(150_000.0, 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False),
    ),
    "glm-4-9b": _config(
        _family("glm4", 1e-5, attention_bias=True),
        (151_552, 4096, 13_696, 40, 32, 2, 32_768),
        (151_329, 151_329),
        head_dim=128,
        pad_token_id=151_329,
        rope_parameters=_DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
    ),
    "granite-3.3-2b": _config(
        _family("granite", 1e-5, theta=10_000_000.0, embedding_multiplier=12.0, attention_multiplier=0.015625),
        (49_159, 2048, 8192, 40, 32, 8, 131_072),
        (0, 0),
        tied=True,
        residual_multiplier=0.22,
        logits_scaling=8.0,
    ),
    "olmo-3-7b": _config(
        _family("olmo3", 1e-6),
        (100_278, 4096, 11_008, 32, 32, 32, 65_536),
        (100_257, 100_257),
        sliding_window=4096,
        layer_types=_every(4, 32, *_WINDOWS),
        rope_parameters={
            "sliding_attention": _DEFAULT_ROPE | {"rope_theta": 500_000.0},
            "full_attention": _yarn(500_000.0, 8.0, 8192, attention_factor=1.2079441541679836),
        },
    ),
    "smollm3-3b": _config(
        _family("smollm3", 1e-6, theta=5_000_000.0),
        (128_256, 2048, 11_008, 36, 16, 4, 65_536),
        (128_000, 128_012),
        tied=True,
        no_rope_layers=[int((number + 1) % 4 != 0) for number in range(36)],
    ),
    "ministral-3-8b": _config(
        _family("ministral3", 1e-5),
        (131_072, 4096, 14_336, 34, 32, 8, 262_144),
        (1, 2),
        head_dim=128,
        sliding_window=None,
        rope_parameters=_yarn(1_000_000.0, 16.0, 16_384, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
        | {"llama_4_scaling_beta": 0.1},
    ),
    "lfm2-1.2b": _config(
        _family("lfm2", 1e-5, theta=1_000_000.0),
        (65_536, 2048, 12_288, 16, 32, 8, 128_000),
        (1, 7),
        tied=True,
        norm_eps=1e-5,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=True,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
        layer_types=["full_attention" if number in (2, 5, 8, 10, 12, 14) else "conv" for number in range(16)],
    ),
    "deepseek-v2-lite": _config(
        _family("deepseek_v2", 1e-6, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128),
        (102_400, 2048, 10_944, 27, 16, 16, 163_840),
        (100_000, 100_001),
        v_head_dim=128,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        rope_parameters=_yarn(10_000.0, 40.0, 4096, beta_fast=32.0, beta_slow=1.0, mscale=0.707, mscale_all_dim=0.707),
    ),
    "olmoe-1b-7b": _config(
        _family("olmoe", 1e-5, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False),
        (50_304, 2048, 1024, 16, 16, 16, 4096),
        (50_279, 50_279),
        pad_token_id=1,
    ),
    "qwen2-57b-a14b": _config(
        _family("qwen2_moe", 1e-6, theta=1_000_000.0, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False),
        (151_936, 3584, 18_944, 28, 28, 4, 131_072),
        (151_643, 151_643),
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20_480,
        decoder_sparse_step=1,
    ),
    "pair": _config(_LLAMA, (4096, 512, 1536, 4, 8, 2, 1024), (0, 0), tied=True, pad_token_id=0),
}
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {name: Shape(name, MappingProxyType(config)) for name, config in _CONFIGS.items()}
)
"""The shapes by name: published models, drafts of a tenth of TinyLlama's and the 8B's cost, examples/pair's target."""
