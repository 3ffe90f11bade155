"""The structs that pass to and from the compiled library (kernels.h, decoder.h), as ctypes has them."""

from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from typing import Any


def _all(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class WeightsStruct(Structure):
    """kernels.h, Weights."""

    _fields_ = [
        *_all(c_int64, "kind", "outputs", "inputs", "group", "group_inputs", "groups", "zero", "scale_type", "bits"),
        *_all(c_void_p, "codes", "scale", "offset", "sums", "bias", "perm", "input_scale", "levels"),
    ]


class ProjectionStruct(Structure):
    """decoder.h, Projection."""

    _fields_ = [("parts", c_int64), ("weights", POINTER(POINTER(WeightsStruct)))]


class RoutingStruct(Structure):
    """kernels.h, Routing."""

    _fields_ = [
        *_all(c_int64, "experts", "chosen", "renormalize", "scoring", "groups", "groups_chosen", "group_best"),
        *_all(c_float, "scale", "tolerance"),
        ("correction", c_void_p),
        ("scaled_inputs", c_int64),
        ("expert_scale", c_void_p),
    ]


class NormStruct(Structure):
    """decoder.h, Norm."""

    _fields_ = _all(c_void_p, "weight", "bias")


class MlpBesideStruct(Structure):
    """decoder.h, MlpBeside."""

    _fields_ = [
        ("gate_up", ProjectionStruct),
        ("down", POINTER(WeightsStruct)),
        *_all(NormStruct, "mlp_output_norm", "router_norm", "input_norm", "output_norm"),
    ]


class MixtureStruct(Structure):
    """decoder.h, Mixture."""

    _fields_ = [
        ("routing", RoutingStruct),
        ("router", POINTER(WeightsStruct)),
        ("gate_up", POINTER(ProjectionStruct)),
        ("down", POINTER(POINTER(WeightsStruct))),
        ("shared_gate_up", ProjectionStruct),
        ("shared_down", POINTER(WeightsStruct)),
        ("shared_gate", POINTER(WeightsStruct)),
        ("beside", POINTER(MlpBesideStruct)),
    ]


class LayerInputsStruct(Structure):
    """decoder.h, LayerInputs."""

    _fields_ = [
        ("table", c_void_p),
        *_all(c_int64, "table_type", "size"),
        ("projection", POINTER(WeightsStruct)),
        ("norm", NormStruct),
        *_all(c_float, "made_scale", "row_scale", "scale"),
    ]


class LayerGateStruct(Structure):
    """decoder.h, LayerGate."""

    _fields_ = [*_all(POINTER(WeightsStruct), "gate", "out"), ("norm", NormStruct)]


class LatentStruct(Structure):
    """decoder.h, Latent."""

    _fields_ = [
        ("query_norm", c_void_p),
        ("query", POINTER(WeightsStruct)),
        ("norm", c_void_p),
        *_all(POINTER(POINTER(WeightsStruct)), "keys", "values"),
        *_all(c_int64, "rotated", "plain"),
        ("eps", c_float),
    ]


class ConvolutionStruct(Structure):
    """decoder.h, Convolution."""

    _fields_ = [*_all(c_void_p, "taps", "bias"), ("count", c_int64)]


class DeltaStruct(Structure):
    """decoder.h, Delta."""

    _fields_ = [
        *_all(c_void_p, "taps", "step", "rate", "query", "key", "norm"),
        *_all(c_int64, "count", "key_heads", "value_heads", "key_dim", "value_dim"),
        ("eps", c_float),
    ]


class MambaStruct(Structure):
    """decoder.h, Mamba."""

    _fields_ = [
        *_all(POINTER(WeightsStruct), "into", "out"),
        *_all(c_void_p, "multipliers", "taps", "bias", "step", "rate", "skip", "norm"),
        *_all(c_int64, "count", "heads", "dim", "groups", "state", "gate_first"),
        *_all(c_float, "low", "high", "read", "added"),
    ]


class LayerStruct(Structure):
    """decoder.h, Layer."""

    _fields_ = [
        *_all(NormStruct, "input_norm", "attention_norm", "mlp_norm", "output_norm"),
        *_all(c_void_p, "query_norm", "key_norm", "value_norm", "sinks"),
        ("qkv", ProjectionStruct),
        ("out", POINTER(WeightsStruct)),
        *_all(c_int64, "window", "rotary", "grows"),
        ("gate_up", ProjectionStruct),
        ("down", POINTER(WeightsStruct)),
        ("parameters", c_void_p),
        ("mixture", POINTER(MixtureStruct)),
        ("latent", POINTER(LatentStruct)),
        ("convolution", POINTER(ConvolutionStruct)),
        ("delta", POINTER(DeltaStruct)),
        ("mamba", POINTER(MambaStruct)),
        ("gate", POINTER(WeightsStruct)),
        *_all(c_int64, "group", "keys", "shares", "keys_as_values"),
        ("own", POINTER(LayerGateStruct)),
        ("scale", c_float),
    ]


class HeadsStruct(Structure):
    """kernels.h, Heads."""

    _fields_ = [
        *_all(c_int64, "heads", "kv_heads", "dim", "rotated", "cache_kind"),
        ("key_factor", c_void_p),
        ("value_dim", c_int64),
        *_all(c_void_p, "key_basis", "value_basis"),
    ]


class ModelStruct(Structure):
    """decoder.h, Model."""

    _fields_ = [
        ("heads", POINTER(HeadsStruct)),
        ("groups", c_int64),
        *_all(
            c_int64, "layers", "hidden", "intermediate", "vocabulary", "activation", "gated", "layer_norm", "parallel"
        ),
        *_all(c_int64, "norm_of_heads", "norm_rotated", "tables", "chunked"),
        *_all(c_float, "norm_eps", "embedding_scale", "attention_scaling", "logits_scale"),
        *_all(c_float, "softcap", "final_softcap"),
        *_all(c_float, "attention_read", "attention_added", "mlp_gates", "mlp_added", "own_added"),
        ("layer", POINTER(LayerStruct)),
        ("norm", NormStruct),
        ("head", POINTER(WeightsStruct)),
        ("embedding", c_void_p),
        ("embedding_type", c_int64),
        ("positions", c_void_p),
        ("inputs", POINTER(LayerInputsStruct)),
    ]


class AnglesStruct(Structure):
    """decoder.h, Angles."""

    _fields_ = [*_all(POINTER(c_void_p), "cos", "sin"), ("growth", c_void_p)]


class TakenStruct(Structure):
    """decoder.h, Taken."""

    _fields_ = [("count", c_int64), *_all(c_void_p, "taps", "out")]


class ChainNoiseStruct(Structure):
    """decoder.h, ChainNoise."""

    _fields_ = [("temperature", c_double), ("steps", c_void_p)]


class BlockNetworkStruct(Structure):
    """block_draft.h, BlockNetwork."""

    _fields_ = [
        *_all(c_int64, "taps", "hidden", "length", "layers", "heads", "kv_heads", "dim", "intermediate", "window"),
        *_all(c_int64, "rank", "vocabulary", "logits"),
        ("eps", c_float),
        *_all(c_void_p, "tap_norms", "fuse_norm", "places", "norm"),
        *_all(POINTER(WeightsStruct), "fuse", "common", "of_row", "head", "whole"),
        *_all(c_void_p, "frequent", "layer", "of_token", "of_memory", "gates", "adds", "sure", "embedding"),
        ("embedding_type", c_int64),
    ]


class BlockLayerStruct(Structure):
    """block_draft.h, BlockLayer."""

    _fields_ = [
        *_all(c_void_p, "attention_norm", "mlp_norm"),
        *_all(POINTER(WeightsStruct), "query", "keys_values", "output", "gate_up", "down"),
    ]


class BlockTextStruct(Structure):
    """block_draft.h, BlockText."""

    _fields_ = [
        *_all(c_void_p, "keys_values", "last"),
        *_all(c_int64, "capacity", "held", "end"),
        *_all(c_void_p, "unread", "at"),
        *_all(c_int64, "fresh", "token", "budget"),
    ]


class BlockGrowthStruct(Structure):
    """block_draft.h, BlockGrowth."""

    _fields_ = [*_all(c_int64, "branch", "considered"), *_all(c_double, "worth", "unsure")]


class BlockPlacesStruct(Structure):
    """block_draft.h, BlockPlaces."""

    _fields_ = _all(c_void_p, "rows", "of_row", "base")


class BlockTreesStruct(Structure):
    """block_draft.h, BlockTrees."""

    _fields_ = [*_all(c_void_p, "tokens", "parents", "counts"), ("stride", c_int64)]


class StoreStruct(Structure):
    """kernels.h, Store."""

    _fields_ = [
        *_all(c_void_p, "keys", "values", "key_scale", "value_scale"),
        ("blocks", c_int64),
        *_all(c_void_p, "table", "states"),
        *_all(c_int64, "held", "width", "state_kind"),
    ]


class BatchStruct(Structure):
    """kernels.h, Batch."""

    _fields_ = [
        ("rows", c_int64),
        *_all(c_void_p, "tokens", "request", "position", "slot", "tail_from", "tail_at", "tail"),
        ("stores", POINTER(StoreStruct)),
        ("before", c_void_p),
        ("requests", c_int64),
    ]
