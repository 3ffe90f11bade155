"""Where a model is: a path or a hub name becomes a directory or a file on this machine. Needs no torch."""

import re
from pathlib import Path

from runtime.errors import UserError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What `from_pretrained` needs of a repository; no pickles, and nothing from its subfolders.
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]


def locate(path: str | Path) -> Path:
    """The model directory or GGUF file that a path or hub name means; downloads what the hub's cache lacks.

    Raises UserError where there is no such directory, where it has no config.json, or where the hub does not give it.
    """
    found = here(path)
    return _from_hub(str(path)) if found is None else found


def here(path: str | Path) -> Path | None:
    """The same on this machine alone; None for a hub name.

    Commands ask this before they import torch, which takes seconds, so that a mistyped path is told at once. Raises
    UserError where there is no such directory, where it has no config.json, or where it cannot be looked into.
    """
    try:
        return _here(path)
    except OSError as error:
        raise UserError(f"{path} cannot be looked into: {error.strerror or error}") from error


def _here(path: str | Path) -> Path | None:
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
        return None
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
