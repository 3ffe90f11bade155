"""What a GGUF file says of Gemma 4, whose layers differ in their heads, channels and rotation."""

from typing import Any

from runtime.checkpoints.architecture import Architecture


def gemma4(a: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """The keys of Gemma 4 that other architectures have not, or not for each layer; none for another model."""
    if a.model_type != "gemma4_text":
        return {}
    # The last layer is one that sees everything.
    whole = a.shape(a.layers - 1)
    sliding = next((a.shape(layer) for layer in range(a.layers) if a.windows[layer] is not None), whole)
    local = config["rope_parameters"].get("sliding_attention") or {}
    share = local.get("partial_rotary_factor") or 1.0
    heads = [a.shape(layer).kv_heads for layer in range(a.layers)]
    return {
        "feed_forward_length": list(a.intermediates) if len(set(a.intermediates)) > 1 else a.intermediates[0],
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "attention.key_length": whole.head_dim,
        "attention.value_length": whole.head_dim,
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.shared_kv_layers": sum(a.source(layer) != layer for layer in range(a.layers)),
        "embedding_length_per_layer_input": a.layer_input,
        "rope.freq_base_swa": float(local.get("rope_theta") or 10_000.0),
        "rope.dimension_count_swa": int(sliding.head_dim * share),
    }
