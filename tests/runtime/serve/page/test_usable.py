"""By keyboard, by axe-core's rules, a long text drawn piece by piece, and a sentence where something is missing."""

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browsing import Watched, tab
from tests.serving import Running, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.page
AXE = Path(__file__).parents[4] / ".axe" / "package" / "axe.min.js"
# Counts the nodes that enter a view; `window.entered`.
_COUNT_NODES = """([view]) => {
  window.entered = 0;
  const nodes = (node) => 1 + [...node.childNodes].reduce((sum, child) => sum + nodes(child), 0);
  new MutationObserver((changes) => {
    for (const change of changes) for (const node of change.addedNodes) window.entered += nodes(node);
  }).observe(document.querySelector(view), { childList: true, subtree: true });
}"""


_AXE_RUN = """() => axe.run(document, { iframes: false, rules: { "focus-order-semantics": { enabled: true } } })
  .then(({ passes, violations }) =>
    [passes.length, violations.map((one) => [one.id, one.nodes.map((node) => node.html)])])
"""


def fill_views(page: Watched) -> None:
    """Has every view show something."""
    page.open("play")
    page.play(prompt="class Stack:\n    def push(self", drafter="lookup+model", max_tokens="60")
    page.open("race")
    page.page.get_by_role("spinbutton", name="Turns").fill("1")
    page.press("race", "Race")
    page.open("compare")
    page.press("compare", "Write both")
    page.page.get_by_label("Your text", exact=True).first.fill(
        "def add(a, b):\n    return a + b\n\n\nclass Queue:\n    pass\n"
    )
    page.press("compare", "Read with both")
    page.open("runs")
    for name in ("int8", "nf4"):
        page.page.get_by_label(f"Choose {name}").check()
    page.page.wait_for_selector("sp-runs iframe >> nth=1")
    page.open("server")
    page.page.wait_for_timeout(2500)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_core_finds_nothing_in_any_view(browser: "Browser", served: Running, scheme: str, width: int) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not here: make test-page fetches it")
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
    with tab(browser, served.address, **options) as page:
        fill_views(page)
        for view in ("play", "race", "compare", "runs", "server"):
            page.open(view)
            if view == "play":
                page.page.locator("sp-play .t.accepted").first.focus()
            page.page.evaluate(AXE.read_text())
            found = page.page.evaluate(_AXE_RUN)
            assert found[0] > 15 and found[1] == [], f"{view}: {json.dumps(found[1], indent=1)[:3000]}"
            assert page.look("() => document.documentElement.scrollWidth <= innerWidth"), (
                f"{view} is wider than {width}"
            )
        assert page.errors == []
        # And it would find what is wrong.
        page.look("() => document.querySelector('sp-server h1').append(document.createElement('button'))")
        assert "button-name" in [name for name, _ in page.page.evaluate(_AXE_RUN)[1]]


def test_a_tokens_card_goes_along_where_focus_scrolls(page: Watched) -> None:
    page.page.set_viewport_size({"width": 360, "height": 500})
    page.open("play")
    page.play(prompt="class Stack:", max_tokens="120", ignore_eos="yes", temperature="0", seed="1")
    card = page.page.locator("sp-play .card")
    for key in ("End", "Home"):
        # The token that has the focus before is in sight, the next one is not.
        page.page.locator("sp-play .t").nth(0 if key == "End" else -1).focus()
        before = page.look("() => scrollY")
        page.page.keyboard.press(key)
        page.page.wait_for_timeout(300)
        assert page.look("() => scrollY") != before
        assert card.is_visible() and "logprob" in card.inner_text()
        inside = page.look(
            "() => { const at = document.querySelector('sp-play .card').getBoundingClientRect();"
            " return at.top >= 0 && at.bottom <= innerHeight && at.left >= 0 && at.right <= innerWidth; }"
        )
        assert inside, key
    # What only a pointer shows goes where the page is scrolled.
    page.page.locator("sp-play .t").filter(has_text=re.compile(r"\w")).first.hover()
    assert card.is_visible()
    page.look("() => { document.activeElement.blur(); scrollBy(0, 40); }")
    page.page.wait_for_timeout(300)
    assert not card.is_visible()


def test_everything_goes_by_keyboard_alone(page_with_original: Watched) -> None:
    page = page_with_original.open("play")
    keys = page.page.keyboard

    def to(selector: str) -> None:
        """Presses Tab until the focus is there."""
        for _ in range(120):
            if page.look("([wanted]) => document.activeElement.matches(wanted)", selector):
                return
            keys.press("Tab")
        raise AssertionError(f"Tab does not reach {selector}")

    to("#prompt")
    keys.press("Control+a")
    keys.type("def f(x):")
    keys.press("Control+Enter")
    page.wait_done("play", 1)
    to("sp-play .t")
    keys.press("ArrowRight")
    keys.press("ArrowRight")
    card = page.page.locator("sp-play .card")
    assert card.is_visible() and "logprob" in card.inner_text() and "ms, of which" in card.inner_text()
    assert card.locator("tr").count() >= 5 and "round " in card.inner_text()
    assert page.look("() => document.activeElement.place") == 2
    keys.press("Escape")
    assert not card.is_visible()
    keys.press("End")
    assert page.look("() => document.activeElement.place") == page.shown()["tokens"] - 1
    to("sp-settings [name=max_tokens]")
    keys.press("Control+a")
    keys.type("900")
    to("sp-settings [name=ignore_eos]")
    keys.press("Space")
    page.page.evaluate("() => document.activeElement.blur()")
    to("sp-play button.main")
    keys.press("Enter")
    keys.press("Tab")
    assert page.look("() => document.activeElement.textContent") == "Stop"
    keys.press("Enter")
    page.wait_done("play", 2)

    for view, button in (("race", "sp-race button.main"), ("compare", "sp-compare button.main")):
        page.page.evaluate("() => document.activeElement.blur()")
        to(f"nav a[href='#{view}']")
        keys.press("Enter")
        to(button)
        keys.press("Enter")
        page.wait_done(view, 1)
        assert page.page.locator(f"sp-{view} .result").first.inner_text()
    page.page.evaluate("() => document.activeElement.blur()")
    to("nav a[href='#runs']")
    keys.press("Enter")
    page.page.wait_for_selector("sp-runs table")
    to("sp-runs [data-key=speed]")
    keys.press("Enter")
    assert page.look("() => document.activeElement.closest('th').getAttribute('aria-sort')") == "ascending"
    to("sp-runs tbody input")
    keys.press("Space")
    page.page.wait_for_selector("sp-runs iframe")
    page.page.evaluate("() => document.activeElement.blur()")
    to("sp-runs svg a")
    keys.press("Enter")
    page.page.evaluate("() => document.activeElement.blur()")
    to("nav a[href='#server']")
    keys.press("Enter")
    page.page.wait_for_selector("sp-server:not([hidden])")


def test_a_long_text_is_drawn_token_by_token_and_never_as_a_whole_again(page: Watched) -> None:
    # What a frame costs must not grow with the text: a page that draws all of it anew is slow where the text is long.
    page.open("play")
    page.look(_COUNT_NODES, "sp-play")
    shown = page.play(prompt="a = 1\n" * 20, temperature="0", max_tokens="800", ignore_eos="1", drafter="lookup")
    assert shown["tokens"] == 800
    entered = page.look("() => window.entered")
    assert 800 <= entered <= 8 * 800, entered
    page.look("() => { const box = document.querySelector('[role=listbox]'); box.replaceWith(box.cloneNode(true)); }")
    assert page.look("() => window.entered") >= entered + 800


def test_a_server_that_is_gone_or_starts_again_is_told_in_a_sentence(
    browser: "Browser", tmp_path: Path, pair: tuple[Path, Path], runs: Path
) -> None:
    copy = tmp_path / "runs"
    shutil.copytree(runs, copy)
    (copy / "foreign").mkdir()
    (copy / "foreign" / "report.json").write_text('{"schema": 2, "size": [1], "recipe": "<b>"}')
    (copy / "broken").mkdir()
    (copy / "broken" / "report.json").write_text("{")
    options = ("--drafter", "none", "--threads", "1", "--runs", str(copy))
    with tab(browser, "") as page:
        with running(tmp_path / "one", [f"pair={pair[0]}"], *options) as server:
            page.address, port = server.address, server.port
            page.open("runs")
            page.page.wait_for_selector("text=report.json is not a report of Specpress")
            page.page.wait_for_selector("text=broken/report.json is not valid JSON")
            page.page.get_by_label("Choose int8").check()
            page.page.wait_for_selector("sp-runs iframe")
            shutil.rmtree(copy / "nf4")
            page.page.get_by_label("Choose nf4").check()
            page.page.wait_for_selector("text=nf4: there is no run of this name any more")
            page.open("play")
            page.fill(max_tokens="900", ignore_eos="1", seed="3")
            page.page.click("sp-play button.main")
            page.page.wait_for_selector("sp-play .t >> nth=20", state="attached")
            server.process.kill()
            page.page.wait_for_selector("text=the text so far stays")
            assert page.shown()["tokens"] > 20
            before = page.shown()["text"]
        page.open("runs")
        page.page.wait_for_selector("sp-runs >> text=The server does not answer")
        page.open("server")
        page.page.wait_for_selector("sp-server >> text=The server does not answer")
        with running(tmp_path / "two", [f"pair={pair[0]}"], *options, "--port", str(port)):
            page.page.wait_for_selector("sp-server sp-notice", state="hidden")
            page.open("play")
            page.page.get_by_role("button", name="Go on").click()
            page.wait_done("play", 2)
            assert page.shown()["tokens"] == 900 and page.shown()["text"].startswith(before)
