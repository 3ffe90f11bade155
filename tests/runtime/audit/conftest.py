"""The known model and its draft, as files, for the tests of the audit."""

from pathlib import Path

import pytest

from runtime.audit import known_files
from runtime.audit.known import read
from runtime.audit.sampled import Known


@pytest.fixture(scope="session")
def known_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `python -m runtime.audit model` writes it."""
    folder = tmp_path_factory.mktemp("audit") / "known"
    known_files.write(folder, 7)
    return folder


@pytest.fixture(scope="session")
def known(known_folder: Path) -> Known:
    """Target and draft in float64."""
    return Known(*read(known_folder))
