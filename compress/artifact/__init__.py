"""A finished run folder, as Python sees it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from compress.artifact import manifest
from runtime.files import read_json

# Names within a partial run folder: of the folder of trained stages, and of the checkpoint of one that is not done.
STAGES, TRAINING = "stages", "training.json"
# Most bytes in one file of weights.
SHARD_BYTES = 1_000_000_000


@dataclass(frozen=True)
class Artifact:
    """The output of a run: `model/ draft/ recipe.yaml manifest.json report.{json,md,html}`."""

    path: Path

    def __init__(self, path: str | Path):
        object.__setattr__(self, "path", Path(path))

    @property
    def model(self) -> Path:
        """The compressed model, a Hugging Face directory."""
        return self.path / "model"

    @property
    def draft(self) -> Path | None:
        """The draft, where the run has one."""
        folder = self.path / "draft"
        return folder if folder.is_dir() else None

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """manifest.json. Raises UserError where it cannot be read."""
        return manifest.read(self.path)

    @cached_property
    def report(self) -> dict[str, Any]:
        """report.json. Raises UserError where it cannot be read."""
        return read_json(self.path / "report.json")

    def verify(self) -> None:
        """Raises UserError naming the first file that differs from the manifest."""
        manifest.verify(self.path)
