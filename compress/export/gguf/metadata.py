"""What a GGUF file says of the architecture: keys out of the model's record. check.py has whether that is all of it."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.errors import UserError
from compress.export.gguf.gemma4 import gemma4
from compress.export.gguf.state_spaces import state_space
from runtime.checkpoints.architecture import Architecture, configuration, describe, in_towers, language_model
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.gguf.families import ACTIVATION
from runtime.checkpoints.gguf.names import (
    ARCHITECTURES,
    LONGROPE_FACTORS,
    NOT_COMPUTED,
    ROPE_FACTORS,
    architecture_of,
)
from runtime.checkpoints.gguf.rope import (
    ATTENTION_FACTOR,
    ORIGINAL_CONTEXT,
    RELEASES,
    TRUNCATE,
    llama3_factors,
    proportional_factors,
)
from runtime.checkpoints.rotation import GGUF_KEY, RotationRecord
from runtime.model.rotary import frequencies

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from numpy.typing import NDArray

Keys = dict[str, Any]
_PHI_3_TOKENS = {"<s>", "</s>", "<unk>", "<|endoftext|>"}
_LLAMA_3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def architecture(checkpoint: Checkpoint) -> tuple[Architecture, Any]:
    """The model's record, and its configuration as its decoder reads it; of a composite that of its language model.

    Raises UserError for architectures that llama.cpp does not have under a name here.
    """
    shown, whole = checkpoint.path.name, configuration(checkpoint)
    config = language_model(whole)
    found = describe(as_values(config))
    if found is not None and config is not whole:
        found = in_towers(found, checkpoint)
    kind = str(checkpoint.config.get("model_type"))
    if (instead := NOT_COMPUTED.get(kind)) is not None:
        raise UserError(
            f"{shown}: llama.cpp does not compute {kind} as transformers does ({instead}): export it to another form"
        )
    if found is None or found.model_type not in ARCHITECTURES:
        raise UserError(
            f"{shown}: expected one of {', '.join(ARCHITECTURES)} for GGUF, found"
            f" {checkpoint.config.get('model_type')!r}: export it to another form"
        )
    return found, config


def as_values(config: Any) -> Keys:
    """A configuration as config.json would have it, defaults filled in."""
    values: Keys = vars(config) if isinstance(config, SimpleNamespace) else config.to_dict()
    return values


def context(a: Architecture) -> tuple[int, str | None]:
    """Tokens of context, and a note where that is fewer than the model's: llama.cpp may have no windows here."""
    windows = [window for window in a.windows if window is not None and window < a.max_positions]
    if not windows or architecture_of(a) in WINDOWS:
        return a.max_positions, None
    return min(windows), (
        f"the context is {min(windows)} tokens, the model's sliding window: llama.cpp has none for this architecture"
    )


WINDOWS = ("gemma2", "gemma3", "gpt-oss", "olmo2", "exaone4", "exaone-moe", "cohere2", "llama4", "gemma4")


def rope(shown: str, config: Any, a: Architecture) -> tuple[dict[str, Any], "dict[str, NDArray[np.float32]]"]:
    """`rope_parameters` of the layers that see everything, with every default filled in; tensors with factors.

    Raises UserError for scalings that a GGUF file has no words for here.
    """
    values = as_values(config)
    whole = values.get("rope_parameters") or values.get("rope_scaling") or {}
    said = dict(whole.get("full_attention") or whole.get("sliding_attention") or whole)
    said.setdefault("rope_type", said.pop("type", "default"))
    said.setdefault("rope_theta", values.get("rope_theta") or 10_000.0)
    size = a.head_dim if a.latent is None else a.latent.rotated
    share = said.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    said["rotated"] = int(size * share)
    kind = said["rope_type"]
    if kind == "dynamic":
        # Up to the context's end it is no other rotation, but for HunYuan's, which means another base.
        stretch = (said.get("alpha") or 1.0) ** (size / (size - 2))
        return said | {"rope_type": "default", "rope_theta": said["rope_theta"] * stretch}, {}
    if kind in ("default", "linear") and a.model_type != "gemma4_text":
        return said, {}
    if kind == "llama3":
        theta, factor, low, high = (float(said[key]) for key in ("rope_theta", "factor", *_LLAMA_3[:2]))
        return said, {ROPE_FACTORS: llama3_factors(theta, said["rotated"], factor, low, high, int(said[_LLAMA_3[2]]))}
    if a.model_type == "gemma4_text":
        size = a.shape(a.layers - 1).head_dim
        pairs = int((said.get("partial_rotary_factor") or 1.0) * size // 2) if kind == "proportional" else size // 2
        said |= {"rope_type": "default", "rotated": size}
        return said, {ROPE_FACTORS: proportional_factors(size, pairs, said.get("factor") or 1.0)}
    if kind == "yarn":
        said["original_max_position_embeddings"] = said.get("original_max_position_embeddings") or a.max_positions
        return said, {}
    if kind == "longrope" and a.model_type == "phi3":
        said["attention_factor"] = frequencies(config)[1]
        return said, {there: np.array(said[key], np.float32) for key, there in LONGROPE_FACTORS.items()}
    raise UserError(
        f"{shown}: expected rotary frequencies that are plain, linear, llama3, yarn or Phi-3's longrope for GGUF, found"
        f" {kind!r} with {', '.join(sorted(set(said) - {'rotated'}))}: export it to another form"
    )


def reads_back(parameters: dict[str, Any]) -> bool:
    """Whether Llama 3's factors are those of its releases, which alone are recognised when the file is read here."""
    return parameters["rope_type"] != "llama3" or tuple(parameters.get(k) for k in _LLAMA_3) in RELEASES


def name(a: Architecture, tokens: Collection[str]) -> str:
    """What the file calls the model: transformers' model_type, which llama.cpp's architecture may not tell.

    It is not the bare word: transformers takes files called "mistral" for an architecture that it then does not find.
    And llama.cpp looks for certain tokens in files that are called phi3, and fails where they have none of that name.
    """
    if a.model_type == "phi3" and not set(tokens) >= _PHI_3_TOKENS:
        return "specpress"
    return f"specpress-{a.model_type}"


def keys(a: Architecture, config: Keys, parameters: dict[str, Any]) -> Keys:
    """The architecture's keys; `parameters` come from `rope`."""
    out: Keys = {
        "context_length": context(a)[0],
        "embedding_length": a.hidden,
        "block_count": a.layers,
        "feed_forward_length": _channels(a),
        "attention.head_count": a.heads,
        f"attention.layer_norm_{'rms_' if a.norm == 'rms' else ''}epsilon": float(a.norm_eps),
        "vocab_size": a.vocab,
    }
    if a.heads:
        # Layers without attention are known by having no heads.
        heads = [a.kv_heads if layer in a.attending or a.delta else 0 for layer in range(a.layers)]
        out |= {
            "attention.head_count_kv": heads if 0 in heads else a.kv_heads,
            "attention.key_length": a.head_dim,
            "attention.value_length": a.value_dim,
        } | _rope(a, config, parameters)
    return (
        out
        | _numbers(a)
        | _windows(a)
        | _experts(a)
        | _layers(a)
        | (state_space(a, a.mamba) if a.mamba else {})
        | gemma4(a, config)
    )


def _channels(a: Architecture) -> int | list[int]:
    """Of an MLP, or of an expert where no layer has an MLP of its own; of each layer where some have neither."""
    own = a.experts is None or a.model_type not in ("granitemoehybrid", "nemotron_h")
    size = a.intermediate if own or a.experts is None else a.experts.hidden
    if len(a.without_mlp) == a.layers:
        return 0
    return [0 if layer in a.without_mlp else size for layer in range(a.layers)] if a.without_mlp else size


def _rope(a: Architecture, config: Keys, parameters: dict[str, Any]) -> Keys:
    out: Keys = {
        "rope.dimension_count": parameters["rotated"],
        "rope.freq_base": float(parameters["rope_theta"]),
    }
    local = (config.get("rope_parameters") or {}).get("sliding_attention")
    if isinstance(local, dict) and a.model_type == "gemma3_text":
        out["rope.freq_base_swa"] = float(local["rope_theta"])
    if parameters["rope_type"] in ("linear", "yarn"):
        out |= {"rope.scaling.type": parameters["rope_type"], "rope.scaling.factor": float(parameters["factor"])}
    if parameters["rope_type"] == "yarn":
        out["rope.scaling.original_context_length"] = int(parameters["original_max_position_embeddings"])
        out[TRUNCATE] = bool(parameters.get("truncate", True))
        for key in ("beta_fast", "beta_slow"):
            if parameters.get(key) is not None:
                out[f"rope.scaling.yarn_{key}"] = float(parameters[key])
        if all_dims := parameters.get("mscale_all_dim"):
            unit = 0.1 if a.latent is not None else 1.0
            out["rope.scaling.yarn_log_multiplier"] = float(all_dims) * unit
    if parameters["rope_type"] == "longrope":
        out["rope.scaling.original_context_length"] = int(parameters[ORIGINAL_CONTEXT])
        out[ATTENTION_FACTOR] = float(parameters["attention_factor"])
    if a.query_growth is not None:
        out["attention.temperature_scale"] = a.query_growth[0]
    return out


def _numbers(a: Architecture) -> Keys:
    """Multipliers and soft caps. Gemma's embedding scale is llama.cpp's own."""
    out: Keys = {}
    if a.softcap:
        out["attn_logit_softcapping"] = float(a.softcap)
    if a.final_softcap:
        out["final_logit_softcapping"] = float(a.final_softcap)
    if a.model_type.startswith("granite"):
        out["attention.scale"] = float(a.scaling)
        out["embedding_scale"], out["residual_scale"] = float(a.embedding_scale), float(a.residual_scale)
        out["logit_scale"] = 1.0 / a.logits_scale
    elif a.logits_scale != 1.0 or a.model_type in ("cohere", "cohere2"):
        out["logit_scale"] = float(a.logits_scale)
    return out


def _windows(a: Architecture) -> Keys:
    found = {window for window in a.windows if window is not None}
    if architecture_of(a) not in WINDOWS or not found:
        return {}
    return {
        "attention.sliding_window": min(found),
        "attention.sliding_window_pattern": [window is not None for window in a.windows],
    }


_GATING = {"softmax": 1, "sigmoid": 2}


def _experts(a: Architecture) -> Keys:
    if a.experts is None:
        return {}
    experts = a.experts
    out: Keys = {"expert_count": experts.count, "expert_used_count": experts.per_token}
    if a.model_type not in ("mixtral", "granitemoe", "granitemoeshared", "olmoe"):
        out["expert_feed_forward_length"] = experts.hidden
    if experts.shared:
        out["expert_shared_feed_forward_length"] = experts.shared
        out["expert_shared_count"] = experts.shared // experts.hidden
    if experts.scoring in _GATING and a.model_type not in ("mixtral", "qwen3_moe"):
        out["expert_gating_func"] = _GATING[experts.scoring]
    if experts.scoring == "sigmoid" or a.latent is not None:
        out["expert_weights_norm"], out["expert_weights_scale"] = experts.renormalize, float(experts.scale)
    if experts.groups[0] > 1:
        out["expert_group_count"], out["expert_group_used_count"] = experts.groups[:2]
    if a.model_type in ("llama4_text", "ernie4_5_moe"):
        out["interleave_moe_layer_step"] = _step(a)
    if a.dense_layers:
        out["leading_dense_block_count"] = len(a.dense_layers)
    return out


def _step(a: Architecture) -> int:
    """Of so many layers of Llama 4 the last is a mixture; Ernie 4.5's follow each other."""
    first = next((layer for layer in range(a.layers) if layer not in a.dense_layers), a.layers)
    return first + 1 if a.model_type == "llama4_text" else 1


def _layers(a: Architecture) -> Keys:
    """What attention's place and the block's form have besides."""
    out: Keys = {}
    if a.model_type in ("gpt_neox", "stablelm"):
        out["use_parallel_residual"] = a.parallel
    if a.model_type in ("gpt_neox", "falcon") and a.activation == "gelu_tanh":
        out[ACTIVATION] = "gelu_pytorch_tanh"
    if a.convolution is not None:
        out["shortconv.l_cache"] = a.convolution.taps
    if (delta := a.delta) is not None:
        out |= {
            "ssm.conv_kernel": delta.taps,
            "ssm.state_size": delta.key,
            "ssm.group_count": delta.key_heads,
            "ssm.time_step_rank": delta.value_heads,
            "ssm.inner_size": delta.values,
            "attention.recurrent_layers": [layer not in a.attending for layer in range(a.layers)],
        }
    if a.model_type in ("qwen3_5_text", "qwen3_5_moe_text"):
        # Of text all sections rotate alike.
        out["rope.dimension_sections"] = [11, 11, 10, 0]
    if (how := a.latent) is not None:
        out["attention.kv_lora_rank"] = how.rank
        out["attention.key_length_mla"], out["attention.value_length_mla"] = how.rotated + how.plain, how.value
        if how.query_rank is not None:
            out["attention.q_lora_rank"] = how.query_rank
    return out


def add(writer: "GGUFWriter", called: str, found: Keys) -> None:
    """Adds general and architecture keys; `called` comes from `name`, `found` from `keys`."""
    from gguf import GGML_QUANT_VERSION

    writer.add_name(called)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    for key, value in found.items():
        full = f"{writer.arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, value)


def add_rotation(writer: "GGUFWriter", record: RotationRecord | None) -> None:
    """Adds what is rotated, in keys of our own, which llama.cpp passes over."""
    if record is None:
        return
    writer.add_uint32(GGUF_KEY.format("residual"), record.residual)
    writer.add_uint32(GGUF_KEY.format("values"), record.values)
    writer.add_uint64(GGUF_KEY.format("seed"), record.seed)
    writer.add_bool(GGUF_KEY.format("untied"), record.untied)
