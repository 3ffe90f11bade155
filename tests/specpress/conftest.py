import subprocess
from pathlib import Path
from typing import Any

import pytest

from compress import Artifact, Recipe, compress
from compress.model.source import default_pair
from tests import warm


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of int4-rtn on the embedded pair, without speed and quality."""
    out = tmp_path_factory.mktemp("runs") / "int4"
    target, draft = default_pair()
    artifact = compress(str(target), Recipe.load("int4-rtn"), out=out, draft=str(draft), speed=False, eval_tokens=0)
    assert isinstance(artifact, Artifact)
    return artifact.path


def specpress(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return warm.run("specpress", *words, timeout=120, **options)


@pytest.fixture(name="specpress")
def _specpress() -> Any:
    return specpress
