"""Reading what somebody else may have put there: nothing is opened that is no file, and JSON is an object."""

import json
from errno import EINVAL
from pathlib import Path
from typing import Any

from runtime.errors import UserError


def regular(path: Path) -> Path:
    """The path itself. Raises OSError for a pipe, a socket or a device: reading one may wait or go on forever."""
    if path.exists() and not path.is_file():
        raise OSError(EINVAL, "expected a file, found a folder, a pipe, a socket or a device", str(path))
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError naming the file, and the line where it is no JSON."""
    shown = f"{path.parent.name}/{path.name}"
    try:
        value = json.loads(regular(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{shown} is not valid JSON: {error.msg} at line {error.lineno}; fetch it again") from error
    except (OSError, ValueError, RecursionError) as error:
        # ValueError: bytes that are no UTF-8, and numbers of more digits than Python reads.
        raise UserError(f"{shown} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{shown} must hold a JSON object, found {type(value).__name__}")
    return value
