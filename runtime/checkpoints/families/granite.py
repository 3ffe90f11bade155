"""Granite and those that have its multipliers: one function each."""

from dataclasses import replace

from runtime.checkpoints.families.common import Config, activation, count, llama, number, windows
from runtime.checkpoints.families.mixtures import of_experts
from runtime.checkpoints.record import Architecture, Names
from runtime.errors import UserError

# What every token goes through, in those that have it.
SHARED = Names(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")


def granite(config: Config) -> Architecture | None:
    """Four multipliers."""
    keys = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    embedding, attention, residual, logits = (number(config.get(key, 1.0), key) for key in keys)
    return llama(
        config,
        activation(config),
        embedding_scale=embedding,
        attention_scale=attention,
        residual_scale=residual,
        logits_scale=1.0 / logits,
    )


def hyperclovax(config: Config) -> Architecture | None:
    """Norms around in most; logits are multiplied, where Granite's are divided."""
    told = {key: value for key, value in config.items() if key != "attention_multiplier" or value is not None}
    found = granite(told)
    if found is None:
        return None
    around = Names(attention_norm="post_norm1", output_norm="post_norm2")
    return replace(
        found,
        names=around if config.get("use_post_norm", True) else found.names,
        attention_scale=found.attention_scale if "attention_multiplier" in told else None,
        logits_scale=1.0 / found.logits_scale,
    )


def granitemoe(config: Config) -> Architecture | None:
    """Granite's multipliers; a softmax over the chosen is one over all, divided by the sum of the chosen."""
    found = granite(config)
    experts = replace(
        of_experts(config, "num_local_experts", "intermediate_size", True),
        names=("block_sparse_moe",),
        routers=("router.layer", "router"),
        fused=(("input_linear.weight", "output_linear.weight"), ("experts.gate_up_proj", "experts.down_proj")),
    )
    return None if found is None else replace(found, experts=experts)


def granitemoeshared(config: Config) -> Architecture | None:
    """With an MLP that every token goes through, in some."""
    found, shared = granitemoe(config), config.get("shared_intermediate_size") or 0
    if found is None or found.experts is None or not shared:
        return found
    experts = replace(found.experts, shared=shared, shared_gate_up=SHARED.gate_up, shared_down=SHARED.down)
    return replace(found, experts=experts)


def granite_swa(config: Config) -> Architecture | None:
    """Sinks, windows in most layers, a base of the rotation for each; and experts in some."""
    layers = count(config, "num_hidden_layers")
    found = granitemoeshared(config) if config["model_type"] == "granitemoe_swa" else granite(config)
    kinds = config.get("layer_types") or ["sliding_attention" if i % 4 else "full_attention" for i in range(layers)]
    bases = config.get("layer_rope_theta")
    if bases is not None and (not isinstance(bases, list | tuple) or len(bases) != layers):
        raise UserError(f"config.json: layer_rope_theta must be {layers} numbers, found {str(bases)[:60]}")
    if found is None:
        return None
    return replace(
        found,
        sinks=True,
        windows=windows(config | {"layer_types": kinds}),
        rotary=tuple(number(base, "layer_rope_theta") or None for base in bases) if bases else (),
    )
