"""`quantization_config` of config.json: where it is, for messages, and what those of our own formats have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import UserError

WHERE = "config.json: quantization_config"
_VERSION = 1


def our_own(method: str, skip: Sequence[str], **said: Any) -> dict[str, Any]:
    """Of a format of ours: its method and version, what it says of its layers, and the linear modules that stay."""
    return {"quant_method": method, "version": _VERSION, **said, "modules_to_not_convert": list(skip)}


def check_version(config: Mapping[str, Any]) -> None:
    """Raises UserError for a format of ours of a later version."""
    version = config.get("version")
    if version != _VERSION:
        raise UserError(f"{WHERE}.version {version!r} is not read: expected {_VERSION}; install a newer specpress")
