"""One server for the tests of this folder: the embedded pair's target, with a draft, few pages and a chat template."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Running, running


@pytest.fixture(scope="session")
def pair() -> tuple[Path, Path]:
    """The embedded pair's target and draft."""
    from compress.model.source import default_pair

    target, draft = default_pair()
    return target, draft


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path]) -> Iterator[Running]:
    """A server of the pair's target as `pair`, whose drafter is the pair's draft."""
    target, draft = pair
    options = (
        "--draft",
        str(draft),
        "--drafter",
        "lookup+model",
        "--threads",
        "1",
        "--stall",
        "3",
        "--max-batch",
        "16",
    )
    with running(tmp_path_factory.mktemp("server"), [f"pair={target}"], *options) as found:
        yield found


@pytest.fixture(scope="session")
def alone(pair: tuple[Path, Path]) -> Any:
    """A Speculator of the same target, without a draft."""
    from runtime import Speculator, load

    return Speculator(load(pair[0], threads=1))
