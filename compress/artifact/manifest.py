"""manifest.json: what an artifact consists of, with checksums. No times and no paths: equal runs give equal bytes."""

import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from compress.artifact.files import listed, sha256, write_json
from compress.errors import USER_ERRORS, UserError
from runtime.files import read_json

NAME = "manifest.json"
SCHEMA = 1
# What the bytes of an artifact or its figures depend on.
_PACKAGES = ("specpress", "torch", "transformers", "tokenizers", "safetensors", "numpy")
_COVERED = ("model", "draft", "medusa", "block", "exports")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # a checkout that was never installed has no version
            continue
    return found


def write(folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Writes manifest.json: `about`, and size and SHA-256 of recipe.yaml and all files of the models' folders."""
    content = {"schema": SCHEMA, **about, "files": _files(folder)}
    write_json(folder / NAME, content)
    return content


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder. Raises UserError where there is none, or it is none of ours."""
    path = folder / NAME
    content = read_json(path)
    if not isinstance(content.get("files"), dict) or "schema" not in content:
        raise UserError(f"{path}: expected the manifest of a run, found something else: name a run folder")
    return content


def is_run_folder(folder: Path) -> bool:
    """Whether a folder was written by a run, judged by its manifest."""
    try:
        return "recipe.yaml" in read(folder)["files"]
    except USER_ERRORS:
        return False


def verify(folder: Path) -> None:
    """Raises UserError naming the first file that is missing, changed, or not in the manifest."""
    expected = read(folder)["files"]
    found = _files(folder)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            state = "is missing" if name not in found else "is unlisted" if name not in expected else "has changed"
            raise UserError(f"{folder / name} {state} since the manifest was written: run again, or restore the file")


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    recipe = folder / "recipe.yaml"
    found = {recipe.name: {"bytes": recipe.stat().st_size, "sha256": sha256(recipe)}} if recipe.is_file() else {}
    for part in _COVERED:
        found |= {f"{part}/{name}": file for name, file in listed(folder / part).items()}
    return found
