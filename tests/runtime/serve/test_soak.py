"""Two minutes of `make soak`: mixed requests, clients that leave, slow readers, and too few pages for all at once."""

from pathlib import Path

from tests.serving import running
from tests.soak import soak


def test_mixed_requests_are_right_under_load(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    options = ("--pages", "24", "--context", "512", "--threads", "1")
    with running(tmp_path, [f"pair={pair[0]}"], *options) as server:
        figures = soak(server, 120, 16, 40, 60)
        assert sum(figures["seen"].values()) > 300 and figures["seen"].get("left", 0) > 30
