"""What both comparisons say of the machine, and how they write their results."""

import json
import os
import platform
from pathlib import Path
from typing import Any

from runtime.errors import UserError


def cpu() -> str:
    """The processor's name."""
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """The processor, its logical cores and the system, for a JSON file."""
    return {"cpu": cpu(), "cores": os.cpu_count(), "system": platform.system()}


def check_json(path: Path | None) -> None:
    """Raises UserError where the file's folder is not there, before minutes are spent on what it is to hold."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UserError(f"--json: the folder of {path} does not exist; make it first")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Beside, then renamed: the file is whole or not there."""
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(json.dumps(content, indent=2) + "\n")
    beside.replace(path)
