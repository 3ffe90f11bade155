"""`model/` and `draft/`: normal Hugging Face directories."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.artifact import safetensors
from compress.artifact.files import copy_synced, write_json
from compress.model.plan import Plan
from runtime.cache import scheme
from runtime.checkpoints import rotation
from runtime.formats import hf_config
from runtime.formats.schemes import SCHEMES

# What a directory may have beside its weights. Code (*.py), pickles (*.bin, *.pt) and model cards are never copied.
_COMPANIONS = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    # What turns images, sound and films into inputs.
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE"),
)
_COMPUTE = ("float32", "float16", "bfloat16")


def copy_companions(source: Path, target: Path) -> None:
    """Copies tokenizer, generation config and licence: known file names only."""
    for name in (*_COMPANIONS, rotation.NORMS):
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            copy_synced(source / name, target / name)


def write_config(
    source: Path, target: Path, quantization: Mapping[str, Any] | None, changes: Mapping[str, Any] | None = None
) -> None:
    """Writes config.json with `quantization_config`, and without pointers to code, which is not copied.

    changes  what the model's sizes are now, where a recipe has changed them.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("auto_map", None)
    # Of a model with towers beside it the language model's sizes stand in a part of their own.
    (config["text_config"] if isinstance(config.get("text_config"), dict) else config).update(changes or {})
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    write_json(target / "config.json", config)


def quantization_config(plan: Plan, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What config.json says of the quantised layers, in the words of bitsandbytes, bitnet or compressed-tensors.

    None where no layer is quantised.

    config  the original's config.json: the loader computes in its dtype.
    """
    if not plan.layers:
        return None
    text = config.get("text_config") or {}
    dtype = next((c[key] for c in (config, text) for key in ("dtype", "torch_dtype") if c.get(key)), None)
    layers = {
        layer.module: SCHEMES[layer.scheme].scheme(layer.group_size, layer.symmetric) for layer in plan.layers.values()
    }
    return hf_config(layers, plan.skipped, compute=dtype if dtype in _COMPUTE else "bfloat16")


def join_model(
    parts: Sequence[Path],
    source: Path,
    out: Path,
    shard_bytes: int,
    quantization: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Puts files of tensors together as the model directory `out`; whatever is beside the weights is of `source`."""
    safetensors.join(parts, out, shard_bytes)
    write_config(source, out, quantization, changes)
    copy_companions(source, out)


def write_model(
    tensors: Iterable[Mapping[str, Tensor]],
    source: Path,
    out: Path,
    shard_bytes: int,
    quantization: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """`join_model` of tensors that are made while they are written: of a few at a time in memory."""
    out.mkdir(parents=True, exist_ok=True)
    parts = []
    for index, some in enumerate(tensors):
        parts.append(out / f"part-{index:05d}.safetensors")
        safetensors.write_part(parts[-1], some)
    join_model(parts, source, out, shard_bytes, quantization, changes)
    for part in parts:
        part.unlink()


def copy_model(source: Path, target: Path, weights: Sequence[Path]) -> None:
    """A model as it is: weights, what its caches take, index, config and tokenizer."""
    target.mkdir(parents=True, exist_ok=True)
    for path in weights:
        copy_synced(path, target / path.name)
    index = source / "model.safetensors.index.json"
    if index.is_file() and len(weights) > 1:
        copy_synced(index, target / index.name)
    write_beside(source, target, None)


def write_beside(source: Path, out: Path, quantization: Mapping[str, Any] | None) -> None:
    """What lies beside a model's weights: config.json, tokenizer, licence, and our cache's factors."""
    write_config(source, out, quantization)
    copy_companions(source, out)
    if (source / scheme.TENSORS).is_file():
        (out / scheme.TENSORS).parent.mkdir(exist_ok=True)
        copy_synced(source / scheme.TENSORS, out / scheme.TENSORS)
