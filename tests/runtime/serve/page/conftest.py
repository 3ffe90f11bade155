"""A browser and a server with runs and an original, for the tests of the page."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browsing import Watched, chromium, missing, tab
from tests.serving import Running, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser


# Of a module, as the browser's client keeps an event loop running in this thread: asyncio.run of others would fail.
@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """The system's Chromium; tests are skipped where there is none."""
    why = missing()
    if why is not None:
        pytest.skip(why)
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def served(
    browser: "Browser", tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path], runs: Path
) -> Iterator[Running]:
    """The pair's target, which its draft drafts for, beside that draft as the "original" of the same tokenizer.

    With γ fixed every text is drafted for, whether it pays on this machine or not.
    """
    target, draft = pair
    drafting = ("--draft", str(draft), "--drafter", "lookup+model", "--draft-length", "4")
    options = (*drafting, "--threads", "1", "--max-batch", "8")
    more = ("--runs", str(runs), "--original", str(draft))
    with running(tmp_path_factory.mktemp("page"), [f"pair={target}"], *options, *more) as found:
        found.wait_models(2)
        yield found


@pytest.fixture
def page(browser: "Browser", server: Running) -> Iterator[Watched]:
    """A tab on the server that the tests of other folders share; nothing may go wrong in it, or reach another host."""
    yield from _tab(browser, server)


@pytest.fixture
def page_with_original(browser: "Browser", served: Running) -> Iterator[Watched]:
    """The same on the server that has an original."""
    yield from _tab(browser, served)


def _tab(browser: "Browser", server: Running) -> Iterator[Watched]:
    with tab(browser, server.address) as watched:
        yield watched
        assert watched.errors == [] and watched.foreign == []
