"""`open_checkpoint`: a path or a hub name becomes a checkpoint, its configuration and headers read and checked."""

import re
from pathlib import Path
from typing import Any

from runtime import formats
from runtime.checkpoints import model_config
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.safetensors import Shards, inside
from runtime.errors import UserError
from runtime.files import read_json

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What `from_pretrained` needs of a repository; no pickles, and nothing from its subfolders.
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a model directory, a run folder (its `model/`), a GGUF file, or a model of the hub by name ("org/name").

    Reads config.json and the headers of the weight files, no weights. Raises UserError, in one sentence that names the
    file, for a missing directory or file, broken JSON, pickled, truncated or escaping weight files, and quantised
    formats that are not read yet.
    """
    try:
        directory = locate(path)
    except OSError as error:
        raise UserError(f"{path} cannot be looked into: {error.strerror or error}") from error
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


def locate(path: str | Path) -> Path:
    """The model directory or GGUF file that a path or hub name means; downloads what the hub's cache lacks.

    Raises UserError where there is no such directory, where it has no config.json, or where the hub does not give it.
    """
    given = str(path)
    where = Path(path).expanduser()
    if where.is_dir() and given:
        for candidate in (where, where / "model"):
            if (candidate / "config.json").exists():
                return candidate.resolve() if candidate.name in ("", "..") else candidate
        raise UserError(f"{given}: no config.json there nor in model/; give a model directory or a run folder")
    if where.is_file() and where.suffix == ".gguf":
        return where
    if where.exists() and given:
        raise UserError(f"{given} is a file; give the model's directory, or a .gguf file")
    if (partial := where.with_name(where.name + ".partial") if where.name else where).is_dir() and given:
        raise UserError(f"{given} does not exist, but {partial.name} does: that run has not ended, so resume it first")
    # A path whose first part is a folder here is a mistyped path, not a name to ask the hub for.
    if isinstance(path, str) and _HUB_NAME.fullmatch(given) and not Path(given.split("/")[0]).is_dir():
        return _from_hub(given)
    raise UserError(f"{given or 'an empty path'}: no such directory; give a model directory, a run folder or org/name")


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
        # The one folder that our artifacts have (runtime/cache/scheme.py); patterns cannot say "all folders but this".
        if (found / "config.json").is_file() and '"specpress"' in (found / "config.json").read_text(encoding="utf-8"):
            snapshot_download(name, allow_patterns=["kv_cache/*.safetensors"])
        return found
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(
            f"{name}: no such directory here, and the hub did not give a model of that name ({reason}); check the name"
            " and the network, or give a local directory"
        ) from error
