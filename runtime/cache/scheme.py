"""How an artifact wants its keys and values held: what it says on disk, and the key factors that it brings.

config.json says it twice. Ours, whatever the weights' format:

    "specpress": {"kv_cache": {"kind": "int4", "tensors": "kv_cache/scales.safetensors"}}

    kind     int8 or int4: per token and head, as quantizer.py rounds.
    tensors  `model.layers.N.self_attn.key_factor` (kv_heads, head_dim) float32 of every layer N that keeps keys.

The tensors have a file of their own in a folder of their own: beside the weights transformers would report them as
unexpected, and engines that read every *.safetensors of a directory would refuse them.

And compressed-tensors', where the weights are its or plain and all layers have keys of one shape:
`quantization_config.kv_cache_scheme`, whose `self_attn.k_scale` and `v_scale` (kv_heads, 1, 1) lie among the weights.
These scales are static and always for 8 bits: 4 static bits a head cost the embedded pair 3 % of perplexity (in
transformers), where 8 cost 0.05 %.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoints.architecture import Architecture, describe
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.record import HeadShape
from runtime.checkpoints.safetensors import Shards
from runtime.contract import FLOATS, UNCALIBRATED, CacheKind, CacheScheme
from runtime.errors import UserError

TENSORS = "kv_cache/scales.safetensors"
_OURS = "config.json: specpress.kv_cache"
_THEIRS = "config.json: quantization_config.kv_cache_scheme"
# compressed-tensors' integers take the range −128..127, and a scale is absmax over its middle.
STATIC_RANGE = 127.5
_STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "attn_head", "dynamic": False}


def factor_name(layer: int) -> str:
    """Name of a layer's key factors."""
    return f"model.layers.{layer}.self_attn.key_factor"


def scale_name(layer: int, part: str) -> str:
    """Name of a layer's static scales, `part` being "k" or "v"."""
    return f"model.layers.{layer}.self_attn.{part}_scale"


def holds_scales(config: Mapping[str, Any]) -> bool:
    """Whether `quantization_config` has a place for kv_cache_scheme: compressed-tensors', or no library's yet.

    Its loader wants keys of one shape in every layer.
    """
    quantization = config.get("quantization_config")
    if quantization is not None and quantization.get("quant_method") != "compressed-tensors":
        return False
    a = describe(dict(config.get("text_config") or config))
    return a is None or (len(a.key_groups) == 1 and all(a.source(layer) == layer for layer in a.attending))


def to_config(config: Mapping[str, Any], kind: CacheKind) -> dict[str, Any]:
    """config.json with both keys added, for a cache of `kind` (int8 or int4). Raises ValueError for floats."""
    if kind in FLOATS:
        raise ValueError(f"a {kind} cache has no scheme")
    ours = {**config.get("specpress", {}), "kv_cache": {"kind": kind, "tensors": TENSORS}}
    changed = {**config, "specpress": ours}
    if holds_scales(config):
        plain: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "dense"}
        plain |= {"quantization_status": "compressed", "config_groups": {}, "ignore": []}
        plain["global_compression_ratio"] = None
        found = config.get("quantization_config")
        changed["quantization_config"] = (plain if found is None else found) | {"kv_cache_scheme": dict(_STATIC)}
    return changed


def read(checkpoint: Checkpoint, a: Architecture, device: torch.device) -> CacheScheme:
    """The scheme of a checkpoint: ours, else compressed-tensors' (rounded per token here, which is finer).

    A scheme that cannot be followed (8-bit floats, zero points) leaves float32, with a note. Raises UserError for keys
    that are malformed, and for factors that are missing, misshapen or not positive.
    """
    ours = checkpoint.config.get("specpress")
    if isinstance(ours, dict) and "kv_cache" in ours:
        return _ours(checkpoint, ours["kv_cache"], a, device)
    theirs = (checkpoint.quantization or {}).get("kv_cache_scheme")
    return UNCALIBRATED if theirs is None else _theirs(checkpoint, theirs)


def _ours(checkpoint: Checkpoint, said: Any, a: Architecture, device: torch.device) -> CacheScheme:
    where = f"{checkpoint.path.name}/{_OURS}"
    keys = said if isinstance(said, dict) else {}
    if keys.get("kind") not in ("int8", "int4") or not isinstance(keys.get("tensors"), str):
        raise UserError(f"{where} must have the kind int8 or int4 and the file of its tensors, found {said!r}")
    tensors = Shards(checkpoint.path, said["tensors"])
    found = [
        torch.stack([_factor(checkpoint, tensors, layer, group.shape) for layer in group.layers]).to(device)
        for group in a.key_groups
    ]
    return CacheScheme(said["kind"], tuple(found))


def _factor(checkpoint: Checkpoint, tensors: Shards, layer: int, shape: HeadShape) -> Tensor:
    name = factor_name(layer)
    factor = tensors[name].float()
    if tuple(factor.shape) != shape:
        raise UserError(
            f"{checkpoint.path.name}: tensor {name} has shape {tuple(factor.shape)}, config.json implies"
            f" {tuple(shape)}; the two do not belong together"
        )
    if not bool(((factor > 0) & torch.isfinite(factor)).all()):
        raise UserError(f"{checkpoint.path.name}: tensor {name} must hold positive numbers; calibrate it again")
    return factor


def _theirs(checkpoint: Checkpoint, said: Any) -> CacheScheme:
    if not isinstance(said, dict):
        raise UserError(f"{checkpoint.path.name}/{_THEIRS} must be a mapping, found {said!r}")
    type_, bits, symmetric = said.get("type", "int"), said.get("num_bits"), said.get("symmetric", True)
    if type_ == "int" and symmetric is True and bits in (8, 4):
        return CacheScheme("int8" if bits == 8 else "int4")
    kind = f"{bits}-bit {'' if symmetric is True else 'asymmetric '}{type_}"
    return CacheScheme(note=f"the checkpoint asks for a cache of {kind} numbers, which is not built: float32 is taken")
