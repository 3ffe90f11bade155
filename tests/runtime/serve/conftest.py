"""One server for the tests of this folder: the embedded pair's target, with a draft, few pages and a chat template."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.serve.run_folders import write_run
from tests.serving import Running, running


@pytest.fixture(scope="session")
def pair() -> tuple[Path, Path]:
    """The embedded pair's target and draft."""
    from compress.model.source import default_pair

    target, draft = default_pair()
    return target, draft


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a few runs with random figures, one of them in a sweep."""
    folder, generator = tmp_path_factory.mktemp("runs"), random.Random(5)
    for name in ("int8", "nf4", "swept/int4-rtn", "swept/int3-gptq"):
        write_run(folder / name, generator)
    (folder / "swept" / "sweep.json").write_text("{}")
    (folder / "swept" / "sweep.html").write_text("<h1>All recipes</h1>")
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path], runs: Path) -> Iterator[Running]:
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
        "--runs",
        str(runs),
    )
    with running(tmp_path_factory.mktemp("server"), [f"pair={target}"], *options) as found:
        yield found


@pytest.fixture(scope="session")
def alone(pair: tuple[Path, Path]) -> Any:
    """A Speculator of the same target, without a draft."""
    from runtime import Speculator, load

    return Speculator(load(pair[0], threads=1))
