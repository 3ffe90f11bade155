"""`open_checkpoint`: a path or a hub name becomes a checkpoint, its configuration and headers read and checked."""

from pathlib import Path
from typing import Any

from runtime import formats
from runtime.checkpoints import model_config
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.locate import locate
from runtime.checkpoints.safetensors import Shards, inside
from runtime.errors import UserError
from runtime.files import read_json


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a model directory, a run folder (its `model/`), a GGUF file, or a model of the hub by name ("org/name").

    Reads config.json and the headers of the weight files, no weights. Raises UserError, in one sentence that names the
    file, for a missing directory or file, broken JSON, pickled, truncated or escaping weight files, and quantised
    formats that are not read yet.
    """
    directory = locate(path)
    if directory.is_file():
        from runtime.checkpoints.gguf.checkpoint import open_gguf

        return open_gguf(directory)
    config = read_json(inside(directory, "config.json", "config.json"))
    model_config.check(config, f"{directory.name}/config.json")
    if config.get("quantization_config") is None and (older := older_quantization(directory)) is not None:
        config["quantization_config"] = older
    try:
        formats.check_supported(config.get("quantization_config"))
    except UserError as error:
        raise UserError(f"{directory.name}/{error}") from error
    return Checkpoint(directory, config, Shards(directory))


def older_quantization(directory: Path) -> dict[str, Any] | None:
    """What files of their own say where config.json says nothing: AutoGPTQ's and AutoAWQ's first form."""
    for method, name in (("gptq", "quantize_config.json"), ("awq", "quant_config.json")):
        if (directory / name).is_file():
            found = read_json(inside(directory, name, name))
            renamed = {"w_bit": "bits", "q_group_size": "group_size"} if method == "awq" else {}
            return {"quant_method": method} | found | {renamed[key]: found[key] for key in renamed if key in found}
    return None
