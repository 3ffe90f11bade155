"""How an artifact wants its keys and values held: what it says on disk, and the key factors that it brings.

config.json says it twice. Ours, whatever the weights' format:

    "specpress": {"kv_cache": {"kind": "int4", "tensors": "kv_cache/scales.safetensors"}}

    kind     int8, int4 or int3: per token and head, as quantizer.py rounds.
    tensors  `model.layers.N.self_attn.key_factor` (kv_heads, head_dim) float32 of every layer N that keeps keys.
    rotated  true: in place of factors `…key_basis` and `…value_basis` (kv_heads, 3, d, d) float32 (kernels/basis.py).
    halves   beside rotated: leading dimensions whose codes have halves, 20. Earlier versions had none and wrote none.

The tensors have a file of their own in a folder of their own: beside the weights transformers would report them as
unexpected, and engines that read every *.safetensors of a directory would refuse them.

And compressed-tensors', where the weights are its or plain and all layers have keys of one shape (plain experts aside,
which transformers takes for packed ones as soon as there is a configuration, and then does not load):
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
from runtime.checkpoints.record import HeadShape, KeyGroup
from runtime.checkpoints.safetensors import Shards
from runtime.contract import FLOATS, UNCALIBRATED, CacheBasis, CacheKind, CacheScheme
from runtime.errors import UserError
from runtime.kv_store import HALVES, IN_BASIS

TENSORS = "kv_cache/scales.safetensors"
_OURS = "config.json: specpress.kv_cache"
_THEIRS = "config.json: quantization_config.kv_cache_scheme"
# compressed-tensors' integers take the range −128..127, and a scale is absmax over its middle.
STATIC_RANGE = 127.5
_STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "attn_head", "dynamic": False}


def factor_name(layer: int) -> str:
    """Name of a layer's key factors."""
    return f"model.layers.{layer}.self_attn.key_factor"


def basis_name(layer: int, part: str) -> str:
    """Name of a layer's bases, `part` being "key" or "value"."""
    return f"model.layers.{layer}.self_attn.{part}_basis"


def scale_name(layer: int, part: str) -> str:
    """Name of a layer's static scales, `part` being "k" or "v"."""
    return f"model.layers.{layer}.self_attn.{part}_scale"


def holds_scales(config: Mapping[str, Any]) -> bool:
    """Whether `quantization_config` has a place for kv_cache_scheme: compressed-tensors', or no library's yet.

    Its loader wants keys of one shape in every layer, and a scheme of experts' weights wherever there are experts.
    """
    quantization, text = config.get("quantization_config"), dict(config.get("text_config") or config)
    if quantization is not None and quantization.get("quant_method") != "compressed-tensors":
        return False
    a = describe(text)
    if not (quantization or {}).get("config_groups") and _has_experts(text, a):
        return False
    return a is None or (len(a.key_groups) == 1 and all(a.source(layer) == layer for layer in a.attending))


def _has_experts(config: Mapping[str, Any], a: Architecture | None) -> bool:
    """Whether a language model is a mixture of experts; of one that is not described (None) its keys tell."""
    if a is not None:
        return a.experts is not None
    return any("experts" in key and isinstance(value, int) and value > 1 for key, value in config.items())


def to_config(config: Mapping[str, Any], kind: CacheKind, rotated: bool = False) -> dict[str, Any]:
    """config.json with both keys added, for a cache of `kind` (of codes). Raises ValueError for floats."""
    if kind in FLOATS:
        raise ValueError(f"a {kind} cache has no scheme")
    said: dict[str, Any] = {"kind": kind, "tensors": TENSORS} | ({"rotated": True, "halves": HALVES} if rotated else {})
    ours = {**config.get("specpress", {}), "kv_cache": said}
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
    rotated = keys.get("rotated", False)
    kinds = tuple(IN_BASIS) if rotated else ("int8", "int4")
    if keys.get("kind") not in kinds or not isinstance(keys.get("tensors"), str) or not isinstance(rotated, bool):
        raise UserError(
            f"{where} must have the kind int8 or int4 (or int4 or int3, rotated) and the file of its tensors, found"
            f" {said!r}"
        )
    tensors = Shards(checkpoint.path, said["tensors"])
    if rotated and said.get("halves") != HALVES:
        raise UserError(
            f"{where} must have {HALVES} halves beside rotated, found {said.get('halves', 'none')}: these bases are of"
            f" another version, whose codes were others; compress the model again by kv-{said['kind']}-rotated"
        )
    if rotated:
        bases = tuple(_bases(checkpoint, tensors, a, group, device) for group in a.key_groups)
        return CacheScheme(said["kind"], bases=bases)
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


def _bases(
    checkpoint: Checkpoint, tensors: Shards, a: Architecture, group: KeyGroup, device: torch.device
) -> CacheBasis:
    sizes = {"key": group.shape.head_dim, "value": group.shape.head_dim if a.latent is None else a.value_dim}
    found = {
        part: torch.stack(
            [_basis(checkpoint, tensors, basis_name(n, part), group.shape[0], size) for n in group.layers]
        )
        for part, size in sizes.items()
    }
    return CacheBasis(found["key"].to(device), found["value"].to(device))


def _basis(checkpoint: Checkpoint, tensors: Shards, name: str, heads: int, size: int) -> Tensor:
    basis = tensors[name].float()
    if tuple(basis.shape) != (heads, 3, size, size):
        raise UserError(
            f"{checkpoint.path.name}: tensor {name} has shape {tuple(basis.shape)}, config.json implies"
            f" {(heads, 3, size, size)}; the two do not belong together"
        )
    if not bool(torch.isfinite(basis).all()):
        raise UserError(f"{checkpoint.path.name}: tensor {name} must hold finite numbers; calibrate it again")
    return basis


def _theirs(checkpoint: Checkpoint, said: Any) -> CacheScheme:
    if not isinstance(said, dict):
        raise UserError(f"{checkpoint.path.name}/{_THEIRS} must be a mapping, found {said!r}")
    type_, bits, symmetric = said.get("type", "int"), said.get("num_bits"), said.get("symmetric", True)
    if type_ == "int" and symmetric is True and bits in (8, 4):
        return CacheScheme("int8" if bits == 8 else "int4")
    kind = f"{bits}-bit {'' if symmetric is True else 'asymmetric '}{type_}"
    return CacheScheme(note=f"the checkpoint asks for a cache of {kind} numbers, which is not built: float32 is taken")
