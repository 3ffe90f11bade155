"""Families without experts beyond Llama's: one function each, which says what differs."""

from dataclasses import replace

from runtime.checkpoints.families.common import (
    Config,
    activation,
    count,
    layer_types,
    llama,
    number,
    rotary_sets,
    windows,
)
from runtime.checkpoints.record import Architecture, Names
from runtime.errors import UserError

_LLAMA = Names()
# Norms before and after, as Gemma calls them; and after alone.
AROUND = replace(
    _LLAMA,
    attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    output_norm="post_feedforward_layernorm",
)
_AFTER = replace(AROUND, input_norm=None, mlp_norm=None)
# One layer before the activation, no gate.
_UNGATED = replace(_LLAMA, gate_up=("mlp.up_proj",))
_FUSED_MLP = replace(_LLAMA, gate_up=("mlp.gate_up_proj",))


def gemma2(config: Config) -> Architecture | None:
    """Gemma 2 and 3: norms around, soft caps, a base of the rotation for each kind of layer, normed queries in 3.

    VaultGemma has Gemma 2's parts without the norms of what is added.
    """
    three = config["model_type"] == "gemma3_text"
    before = replace(AROUND, attention_norm=None, output_norm=None)
    scalar = config.get("query_pre_attn_scalar") or 256
    if config.get("use_bidirectional_attention"):
        return None
    return llama(
        config,
        activation(config, "gelu_pytorch_tanh", "hidden_activation"),
        names=before if config["model_type"] == "vaultgemma" else AROUND,
        tied=bool(config.get("tie_word_embeddings", True)),
        norm_offset=1.0,
        embedding_scale=count(config, "hidden_size") ** 0.5,
        attention_scale=scalar**-0.5,
        # Gemma 3's configuration has the key, and no layer of it reads it.
        softcap=0.0 if three else config.get("attn_logit_softcapping") or 0.0,
        final_softcap=config.get("final_logit_softcapping") or 0.0,
        query_key_norm=three,
        rotary=rotary_sets(config),
        windows=windows(config),
    )


def smollm3(config: Config) -> Architecture | None:
    """Every few layers have no positions."""
    layers = count(config, "num_hidden_layers")
    rotated = config.get("no_rope_layers") or [(i + 1) % config.get("no_rope_layer_interval", 4) for i in range(layers)]
    if len(rotated) != layers:
        raise UserError(f"config.json: no_rope_layers must tell of {layers} layers, found {len(rotated)}")
    return llama(
        config,
        activation(config),
        tied=bool(config.get("tie_word_embeddings", True)),
        rotary=tuple("" if rotated[i] else None for i in range(layers)),
        windows=windows(config) if config.get("use_sliding_window") else (None,) * layers,
    )


def olmo2(config: Config) -> Architecture | None:
    """Norms of what is added, and of all queries and all keys as one vector."""
    return llama(
        config,
        activation(config),
        names=_AFTER,
        norm_eps=config.get("rms_norm_eps", 1e-5),
        query_key_norm=True,
        query_key_span="heads",
        rotary=rotary_sets(config),
        windows=windows(config) if config["model_type"] == "olmo3" else (None,) * count(config, "num_hidden_layers"),
    )


def glm4(config: Config) -> Architecture | None:
    """Norms around, neighbours rotate."""
    names = replace(_FUSED_MLP, attention_norm="post_self_attn_layernorm", output_norm="post_mlp_layernorm")
    return llama(config, activation(config), names=names, rotary_neighbours=True)


def glm(config: Config) -> Architecture | None:
    """The generation before: norms before alone."""
    return llama(config, activation(config), names=_FUSED_MLP, rotary_neighbours=True)


def windowed(config: Config) -> Architecture | None:
    """Ministral: Mistral's parts, layers of two kinds."""
    return llama(config, activation(config), windows=windows(config), rotary=rotary_sets(config))


def ministral3(config: Config) -> Architecture | None:
    """Queries grow with their position."""
    rope = config.get("rope_parameters") or {}
    beta, start = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    growth = (float(beta), int(start), 0) if beta and start else None
    return llama(config, activation(config), windows=windows(config), query_growth=growth)


def plain(config: Config) -> Architecture | None:
    """Llama's parts under Llama's names; biases are found by their names."""
    return llama(config, activation(config))


def neighbours(config: Config) -> Architecture | None:
    """The same, with neighbours rotating."""
    tied = bool(config.get("tie_word_embeddings", config["model_type"] == "ernie4_5"))
    return llama(config, activation(config), rotary_neighbours=True, tied=tied)


def ungated(config: Config) -> Architecture | None:
    """The same with an MLP without a gate."""
    return llama(config, activation(config, "relu2"), names=_UNGATED, gated=False)


def jais2(config: Config) -> Architecture | None:
    """Layer norms, an MLP without a gate."""
    eps, act = config.get("layer_norm_eps", 1e-5), activation(config, "relu2")
    return llama(config, act, names=_UNGATED, norm="layer", norm_eps=eps, gated=False)


def exaone4(config: Config) -> Architecture | None:
    """Norms of what is added; with windows, the layers that see everything have no positions."""
    kinds = layer_types(config)
    mixed = config.get("sliding_window") is not None and kinds is not None
    rotary = tuple("" if kind == "sliding_attention" else None for kind in kinds or ()) if mixed else ()
    return llama(
        config,
        activation(config),
        names=_AFTER,
        query_key_norm=True,
        rotary=rotary,
        windows=windows(config) if mixed else (None,) * count(config, "num_hidden_layers"),
    )


def hunyuan(config: Config) -> Architecture | None:
    """Queries and keys are normed after they are rotated."""
    names = replace(_LLAMA, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
    return llama(config, activation(config), names=names, query_key_norm=True, query_key_norm_rotated=True)


def starcoder2(config: Config) -> Architecture | None:
    """Layer norms and a plain MLP."""
    names = replace(_LLAMA, gate_up=("mlp.c_fc",), down="mlp.c_proj")
    return llama(
        config,
        activation(config, "gelu_pytorch_tanh"),
        names=names,
        norm="layer",
        gated=False,
        norm_eps=config.get("norm_epsilon", 1e-5),
        tied=bool(config.get("tie_word_embeddings", True)),
        windows=windows(config),
    )


def stablelm(config: Config) -> Architecture | None:
    """Layer norms; attention and MLP side by side in some."""
    parallel = bool(config.get("use_parallel_residual", False))
    names = replace(
        _LLAMA,
        mlp_norm="input_layernorm" if parallel else "post_attention_layernorm",
        query_norm="self_attn.q_layernorm.norms.{}",
        key_norm="self_attn.k_layernorm.norms.{}",
    )
    return llama(
        config,
        activation(config),
        names=names,
        norm="layer",
        parallel=parallel,
        norm_eps=config.get("layer_norm_eps", 1e-5),
        query_key_norm=bool(config.get("qk_layernorm", False)),
        query_key_span="each head",
    )


def phi(config: Config) -> Architecture | None:
    """Attention and MLP side by side, layer norms, biases everywhere."""
    if config.get("qk_layernorm"):
        return None
    names = replace(
        _LLAMA,
        norm="model.final_layernorm",
        mlp_norm="input_layernorm",
        out="self_attn.dense",
        gate_up=("mlp.fc1",),
        down="mlp.fc2",
    )
    return llama(
        config,
        activation(config, "gelu_new"),
        names=names,
        norm="layer",
        parallel=True,
        gated=False,
        norm_eps=config.get("layer_norm_eps", 1e-5),
    )


def cohere(config: Config) -> Architecture | None:
    """Side by side, layer norms without bias, neighbours rotate; queries and keys are normed in the larger ones."""
    return llama(
        config,
        activation(config),
        names=replace(_LLAMA, mlp_norm="input_layernorm"),
        norm="layer",
        parallel=True,
        norm_eps=number(config.get("layer_norm_eps", 1e-5), "layer_norm_eps"),
        tied=bool(config.get("tie_word_embeddings", True)),
        rotary_neighbours=True,
        query_key_norm=bool(config.get("use_qk_norm", False)),
        query_key_span="each head",
        logits_scale=number(config.get("logit_scale", 0.0625), "logit_scale"),
    )


def cohere2(config: Config) -> Architecture | None:
    """The same; only layers with a window rotate."""
    found, kinds = cohere(config | {"use_qk_norm": False}), layer_types(config) or []
    rotary = tuple("" if kind == "sliding_attention" else None for kind in kinds)
    if found is None:
        return None
    return replace(found, query_key_span="head", rotary=rotary, windows=windows(config))


def nemotron(config: Config) -> Architecture | None:
    """Layer norms whose weights are stored minus 1, squared rectifiers."""
    return llama(
        config,
        activation(config, "relu2"),
        names=_UNGATED,
        norm="layer",
        norm_offset=1.0,
        gated=False,
        norm_eps=config.get("norm_eps", 1e-5),
    )


def apertus(config: Config) -> Architecture | None:
    """An activation with trained parameters, no gate, normed queries and keys."""
    names = replace(_UNGATED, input_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
    return llama(config, activation(config, "xielu"), names=names, gated=False, query_key_norm=True)
