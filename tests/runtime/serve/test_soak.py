"""`make soak` in short: mixed requests, clients that leave, slow readers, and too few pages for all at once."""

from pathlib import Path

import pytest

from tests.serving import running
from tests.soak import soak


@pytest.mark.parametrize("seconds", [15, pytest.param(120, marks=pytest.mark.slow)])
def test_mixed_requests_are_right_under_load(tmp_path: Path, pair: tuple[Path, Path], seconds: int) -> None:
    options = ("--pages", "24", "--context", "512", "--threads", "1")
    with running(tmp_path, [f"pair={pair[0]}"], *options) as server:
        figures = soak(server, seconds, 16, seconds // 3, seconds // 2)
        assert sum(figures["seen"].values()) > 1.5 * seconds and figures["seen"].get("left", 0) > seconds // 5
