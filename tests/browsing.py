"""The page in the system's Chromium, for tests: opened, watched for what must not happen, and asked what it shows."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
WAIT = 20_000  # milliseconds
_SHOWN = """() => {
  const play = document.querySelector("sp-play");
  const count = (what) => play.querySelectorAll(`sp-tokens ${what}`).length;
  const text = (what) => play.querySelector(what).textContent;
  const words = (one) => [...one.children].map((cell) => cell.textContent);
  return {
    text: [...play.querySelectorAll("sp-tokens .t:not(.empty)")].map((one) => one.textContent).join(""),
    tokens: count(".t"),
    own: count(".t.own"),
    accepted: count(".t.accepted"),
    forced: count(".t.forced"),
    ghosts: count(".ghost"),
    why: text(".why"),
    notice: text("sp-notice"),
    stats: Object.fromEntries([...play.querySelectorAll(".stats div")].map(words)),
  };
}"""


def missing() -> str | None:
    """Why the page cannot be opened here; None where it can."""
    if CHROMIUM is None:
        return "there is no Chromium here"
    if find_spec("playwright") is None:
        return "playwright is not installed: pip install 'specpress[page-test]'"
    return None


@contextmanager
def chromium() -> Iterator["Browser"]:
    """The system's browser, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A tab on a server's page. `errors`: what scripts and the policy complained of; `foreign`: requests elsewhere."""

    page: "Page"
    address: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(WAIT)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("requestfailed", lambda request: self._failed(request.url, request.failure))

    def _asked(self, url: str) -> None:
        if urlsplit(url).netloc != urlsplit(self.address).netloc and urlsplit(url).scheme not in ("data", "about"):
            self.foreign.append(url)

    def _failed(self, url: str, why: str | None) -> None:
        # What the policy stopped was never sent.
        if why == "csp" and url in self.foreign:
            self.foreign.remove(url)

    def open(self, view: str) -> "Watched":
        """Shows a view, and waits until it is there."""
        self.page.goto(f"{self.address}/#{view}")
        self.page.wait_for_selector(f"sp-{view.split('?')[0]} h1")
        return self

    def done(self, view: str) -> int:
        """How many things a view was asked for and has done."""
        return int(self.page.get_attribute(f"sp-{view}", "data-done") or 0)

    def wait_done(self, view: str, count: int) -> None:
        """Waits until a view has done so many things."""
        self.page.wait_for_selector(f"sp-{view}[data-done='{count}']", timeout=3 * WAIT)

    def press(self, view: str, button: str) -> None:
        """Presses a button of a view, and waits until what it begins is done."""
        count = self.done(view) + 1
        self.page.locator(f"sp-{view}").get_by_role("button", name=button, exact=True).click()
        self.wait_done(view, count)

    def look(self, script: str, *values: Any) -> Any:
        """What a JavaScript function of `values` returns."""
        return self.page.evaluate(script, list(values))

    def play(self, **values: str) -> dict[str, Any]:
        """Writes a text in Play with these settings, whole: `shown`."""
        self.fill(**values)
        self.press("play", "Run")
        return self.shown()

    def fill(self, **values: str) -> None:
        """Sets Play's settings by their names; groups are opened."""
        closed = self.page.locator("sp-settings details:not([open]) summary")
        while closed.count():
            closed.first.click()
        for name, text in values.items():
            place = self.page.locator("#prompt" if name == "prompt" else f"sp-settings [name={name}]")
            if name in ("drafter", "verify"):
                place.select_option(text)
            elif name == "ignore_eos":
                place.set_checked(bool(text))
            else:
                place.fill(text)

    def shown(self) -> dict[str, Any]:
        """The text in Play, its tokens by origin, ghosts, and the figures beside it."""
        found: dict[str, Any] = self.look(_SHOWN)
        return found


@contextmanager
def tab(browser: "Browser", address: str, **options: Any) -> Iterator[Watched]:
    """A tab of its own, with nothing kept from others; `options` as Playwright's `new_context`."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    try:
        yield Watched(context.new_page(), address)
    finally:
        context.close()
