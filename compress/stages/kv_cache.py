"""Calibrates key/value caches: factors or bases of keys for our caches, static scales per head for other engines.

A quantised cache rounds a key's channels with one step per token and head, which its largest channel sets. So keys are
divided by fixed factors first. Which factors lose least is searched, head by head, by the error of the attention
logits q · k that the rounding leaves on calibration text. The candidates are powers of the channels' root mean square,
0 (no factors) to 1 (all channels equally large). SmoothQuant (2211.10438) shares a range between two channels by such
an exponent, and KIVI (2402.02750) found that it is channels in which keys are uneven.

Rotation moves energy between the two channels of a pair and keeps its sum, so a pair shares a factor: what was
calibrated on short windows holds at every position.

A rotated cache (int4, int3) has a basis for each head in place of factors: compress/quantize/cache_basis.py. It mixes
pairs, so the windows are turned as if they stood all over the positions that the model takes.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compress.artifact import SHARD_BYTES, safetensors
from compress.artifact.files import write_json
from compress.errors import UserError
from compress.quantize.cache_basis import best_basis
from compress.stages.attention_inputs import Heads, attention_inputs
from runtime import load
from runtime.cache import scheme
from runtime.cache.quantizer import LIMITS
from runtime.checkpoints.architecture import Architecture, describe
from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.safetensors import Shards
from runtime.kernels.dispatch import choose
from runtime.kernels.reference import quantize_rows
from runtime.kv_store import IN_BASIS
from runtime.model.base import BaseDecoder
from runtime.model.reference import LlamaDecoder
from runtime.model.rotary import RotaryTables

Kind = Literal["int8", "int4", "int3"]
# Windows are spread over this many positions at most.
_POSITIONS = 32_768
EXPONENTS = tuple(n / 8 for n in range(9))
# A channel that was silent on the calibration text is taken to have this share of its head's root mean square.
_FLOOR = 1 / 64


# ------------------------------------------------------------------------------------------------- the mathematics
def pair_rms(keys: Tensor, rotated: int) -> Tensor:
    """Root mean square (heads, d) of the channels of keys (n, heads, d) float32; the two of a rotary pair share theirs.

    rotated  leading channels that rotate, even: i and i + rotated / 2 are a pair (0: none).
    """
    energy = keys.double().square().mean(0)
    half = rotated // 2
    shared = (energy[:, :half] + energy[:, half:rotated]) / 2
    return torch.cat((shared, shared, energy[:, rotated:]), dim=1).sqrt().float()


def factors_of(rms: Tensor, exponent: float) -> Tensor:
    """Factors rms^exponent (…, d) of channels' root mean squares, geometric mean 1 in each head; 1 where all is 0."""
    whole = rms.double().square().mean(-1, keepdim=True).sqrt()
    logs = (rms / whole).clamp_min(_FLOOR).where(whole > 0, 1.0).log()
    return (exponent * (logs - logs.mean(-1, keepdim=True))).exp().float()


def logit_error(keys: Tensor, moment: Tensor, factor: Tensor, kind: Kind) -> float:
    """Relative error of the logits of a head's keys (n, d) that are stored by a factor (d,).

    moment  (d, d) mean of q qᵀ over the queries that read the head. With e the error of a key, the mean square error of
            its logits is eᵀ · moment · e; it is set against that of forgetting the key. 0 where all keys are 0.
    """
    codes, scale = quantize_rows(keys / factor, LIMITS[kind])
    lost = (codes.float() * scale[:, None]) * factor - keys
    error, whole = (float(((x @ moment) * x).sum(dtype=torch.float64)) for x in (lost, keys))
    return (max(error, 0.0) / whole) ** 0.5 if whole > 0 else 0.0


def search(keys: Tensor, moments: Tensor, rotated: int, kind: Kind) -> Tensor:
    """The factors (heads, d) of a layer's keys (n, heads, d) float32, with the least `logit_error` of all EXPONENTS.

    moments  (heads, d, d), see `logit_error`. Of equal errors the smaller exponent wins, so a head that gains nothing
             has no factors.
    """
    rms = pair_rms(keys, rotated)
    chosen = []
    for head in range(keys.shape[1]):
        own = keys[:, head].contiguous()
        candidates = [factors_of(rms[head], exponent) for exponent in EXPONENTS]
        errors = [logit_error(own, moments[head], factor, kind) for factor in candidates]
        chosen.append(candidates[errors.index(min(errors))])
    return torch.stack(chosen)


def static_scale(absmax: Tensor) -> Tensor:
    """Scales (heads,) of symmetric int8 codes from the largest |x| of each head; 1 for a head of zeros."""
    return torch.where(absmax > 0, absmax / scheme.STATIC_RANGE, 1.0).float()


# --------------------------------------------------------------------------------------------------------- the stage
@dataclass(frozen=True)
class LayerScales:
    """Of a layer's keys and values, float32.

    key_factor  (kv_heads, head_dim).
    key_scale   (kv_heads,), and value_scale: static, symmetric, of 8 bits.
    bases       of a rotated cache, whose factors are 1: of keys (kv_heads, 3, d, d), and of values.
    """

    key_factor: Tensor
    key_scale: Tensor
    value_scale: Tensor
    bases: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Calibrated:
    """What `attach` writes: of each layer that has keys, by its number."""

    kind: Kind
    layers: Mapping[int, LayerScales]

    @property
    def rotated(self) -> bool:
        """Whether heads have bases in place of factors."""
        return any(of.bases is not None for of in self.layers.values())

    def tensors(self) -> dict[str, Tensor]:
        """The key factors by name, or the bases."""
        if not self.rotated:
            return {scheme.factor_name(layer): of.key_factor for layer, of in self.layers.items()}
        found = [(layer, of.bases) for layer, of in self.layers.items() if of.bases is not None]
        return {
            scheme.basis_name(layer, part): basis
            for layer, bases in found
            for part, basis in zip(("key", "value"), bases, strict=True)
        }

    def scales(self) -> dict[str, Tensor]:
        """The static scales by name, (kv_heads, 1, 1) as compressed-tensors has them."""
        out = {scheme.scale_name(layer, "k"): of.key_scale[:, None, None] for layer, of in self.layers.items()}
        return out | {scheme.scale_name(layer, "v"): of.value_scale[:, None, None] for layer, of in self.layers.items()}

    def key_factors(self, a: Architecture) -> tuple[Tensor, ...]:
        """The key factors as an unrotated cache of the model takes them (contract.CacheScheme)."""
        return tuple(torch.stack([self.layers[layer].key_factor for layer in group.layers]) for group in a.key_groups)


def calibrate(
    model: str | Path,
    kind: Kind,
    windows: Tensor,
    threads: int | None = None,
    on_step: Callable[[int, int], None] | None = None,
    rotated: bool = False,
) -> Calibrated:
    """Calibrates a finished model directory on windows (W, L) int64 of text. Equal calls give equal tensors.

    The model runs as it will run: packed weights, the runtime's kernels. Memory as `attention_inputs` has it, besides
    the packed weights. `on_step` is told (layers done, layers) after each layer. `rotated` (int4, int3): bases in place
    of factors.

    Raises UserError for a model that the runtime's own decoder does not run, for no windows or windows that are longer
    than the model's positions, and for keys or values that are NaN or infinite (the layer is named).
    """
    loaded = load(model, threads=threads)
    path = loaded.path
    if not isinstance(loaded.decoder, BaseDecoder):
        raise UserError(
            f"{path.name}: a quantised cache needs Specpress' own decoder, and transformers runs this model: "
            "remove the recipe's key kv"
        )
    a, positions = loaded.decoder.architecture, loaded.decoder.max_positions
    if windows.ndim != 2 or not windows.numel() or windows.shape[1] > positions:
        raise UserError(
            f"kv: expected one window or more of at most {positions} tokens, found {list(windows.shape)}: "
            "change samples or seq_len"
        )
    parts = loaded.decoder.parts
    if parts.embedding is None:  # the native kernels keep a tied table in their own layout
        parts = replace(parts, embedding=open_checkpoint(path).tensor(f"{a.names.embedding}.weight"))
    # The same layers, whose own calls leave queries and keys in sight.
    decoder = LlamaDecoder(a, loaded.config, parts, choose("reference", "cpu"))
    rotary = RotaryTables(loaded.config, a, torch.device("cpu"))
    found: dict[int, LayerScales] = {}
    total = sum(len(group.layers) for group in a.key_groups)
    starts = _starts(len(windows), min(positions, _POSITIONS) - windows.shape[1]) if rotated else None
    for layer, heads in attention_inputs(decoder, windows, starts, costs=rotated):
        if not (torch.isfinite(heads.keys).all() and torch.isfinite(heads.values).all()):
            raise UserError(
                f"{path.name}: model.layers.{layer}.self_attn gives keys or values that are no finite numbers on the "
                "calibration text: check the weights"
            )
        found[layer] = LayerScales(
            torch.ones(heads.keys.shape[1:])
            if rotated
            else search(heads.keys, heads.moments, rotary.width(layer), kind),
            static_scale(heads.keys.abs().amax((0, 2))),
            static_scale(heads.values),
            bases(heads, kind) if rotated else None,
        )
        if on_step is not None:
            on_step(len(found), total)
    return Calibrated(kind, dict(sorted(found.items())))


def bases(heads: Heads, kind: Kind) -> tuple[Tensor, Tensor]:
    """Bases (kv_heads, 3, d, d) of a layer's keys and values: an error of a key costs what it does to the scores of the
    queries that meet it and by them to the residual stream, one of a value what it adds to that."""
    assert heads.mixing is not None
    rows, costs = (heads.keys, heads.value_rows), (heads.moments, heads.mixing)
    keys, values = (
        torch.stack([best_basis(part[:, head], cost, IN_BASIS[kind], keys) for head, cost in enumerate(cost_of)])
        for part, cost_of, keys in zip(rows, costs, (True, False), strict=True)
    )
    return keys, values


def _starts(windows: int, room: int) -> list[int]:
    """Where each window is taken to begin: spread evenly over `room` more positions."""
    return [max(0, room) * number // max(1, windows - 1) for number in range(windows)]


def attach(model: Path, found: Calibrated, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes what was calibrated into a model directory that nobody reads yet (a run's partial folder).

    config.json gets the keys of cache/scheme.py, and kv_cache/ the factors. The static scales join the weights where
    config.json has a word for them (compressed-tensors, or plain weights), else the factors. The same result attached
    again changes nothing. What an interrupted call leaves behind is to be made anew.

    Raises ValueError for a directory that has other static scales already.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    beside = found.tensors()
    if scheme.holds_scales(config):
        _join(model, found.scales(), shard_bytes)
    else:
        beside |= found.scales()
    extra = model / scheme.TENSORS
    extra.parent.mkdir(exist_ok=True)
    safetensors.write_part(extra, beside)
    write_json(model / "config.json", scheme.to_config(config, found.kind, found.rotated))


def _join(model: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    """Writes the shards again with more tensors: in a folder beside, since their names change with their number."""
    held = Shards(model)
    if present := [name for name in tensors if name in held]:
        if len(present) < len(tensors) or not all(torch.equal(held[name], tensors[name]) for name in present):
            raise ValueError(f"{model.name} has other static scales already, {present[0]} for one")
        return
    old = held.files
    aside = model / ".joined"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    part = aside / "part.safetensors"
    safetensors.write_part(part, tensors)
    names = safetensors.join([*old, part], aside, shard_bytes)
    part.unlink()
    for path in (*old, model / safetensors.INDEX):
        path.unlink(missing_ok=True)
    for name in names:
        (aside / name).replace(model / name)
    aside.rmdir()


def check(config: Mapping[str, Any]) -> None:
    """Raises UserError for a config.json whose model can have no quantised cache, before a run starts."""
    found = describe(dict(config))
    if found is not None and any(found.state_sizes):
        raise UserError(
            f"kv: layers of {config.get('model_type')!r} carry a state in attention's place, and the stage measures"
            " attention alone: remove the recipe's key kv"
        )
    if found is None and isinstance(config.get("text_config"), Mapping):
        raise UserError(
            f"kv: keys and values are calibrated of a language model alone, and {config.get('model_type')!r} has more "
            "beside it: remove the recipe's key kv"
        )
    if found is None:
        raise UserError(
            f"kv: a quantised cache needs Specpress' own decoder, which does not run {config.get('model_type')!r}: "
            "remove the recipe's key kv"
        )
