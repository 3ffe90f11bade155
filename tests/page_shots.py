"""Pictures of every view of the page, light and dark, narrow and wide: `python -m tests.page_shots OUT`.

The server is a real one, with the pair's target, its draft, and runs of random figures (or those of --runs DIR).
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from compress.model.source import default_pair
from tests.browsing import Watched, chromium, missing, tab
from tests.runtime.serve.run_folders import write_run
from tests.serving import running

VIEWS = ("play", "race", "compare", "runs", "server")
_RECIPES = ("int8-dynamic", "nf4", "int4-rtn", "int4-gptq", "int3-gptq", "mixed-4.5bit", "int4-awq", "fp8")


def main() -> int:
    """Writes OUT/VIEW-SCHEME-WIDTH.png, and the empty state of each view; exit code 1 where there is no browser."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=Path, help="a folder of real runs")
    parser.add_argument("--target", help="a run folder or model; without it the embedded pair's target")
    said = parser.parse_args()
    why = missing()
    if why is not None:
        print(why)
        return 1
    said.out.mkdir(parents=True, exist_ok=True)
    target, draft = default_pair()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        runs = said.runs or _write_runs(folder / "runs")
        model = [said.target] if said.target else [f"pair={target}", "--draft", str(draft), "--drafter", "lookup+model"]
        options = ("--runs", str(runs), "--original", str(target if said.target else draft), "--threads", "1")
        with running(folder / "server", model[:1], *model[1:], *options) as server, chromium() as browser:
            server.wait_models(2)
            for width in (360, 1280):
                for scheme in ("light", "dark"):
                    view = {"width": width, "height": 800}
                    with tab(browser, server.address, color_scheme=scheme, viewport=view) as page:
                        for name in VIEWS:
                            page.open(name)
                            _shot(page, said.out / f"{name}-empty-{scheme}-{width}.png")
                        fill(page)
                        for name in VIEWS:
                            page.open(name)
                            page.page.wait_for_timeout(300)
                            _shot(page, said.out / f"{name}-{scheme}-{width}.png")
                        page.open("play")
                        page.page.locator("sp-play .t.accepted").nth(3).focus()
                        page.page.screenshot(path=said.out / f"play-token-{scheme}-{width}.png")
    print(f"{len(list(said.out.glob('*.png')))} pictures in {said.out}")
    return 0


def fill(page: Watched) -> None:
    """Has every view show something."""
    page.open("play")
    page.play(prompt="class Stack:\n    def push(self", drafter="lookup", max_tokens="90", temperature="0.4", seed="2")
    page.open("race")
    page.page.get_by_role("spinbutton", name="Turns").fill("2")
    page.press("race", "Race")
    page.open("compare")
    page.press("compare", "Write both")
    page.page.get_by_label("Your text", exact=True).first.fill(Path(__file__).read_text()[:900])
    page.press("compare", "Read with both")
    page.open("runs")
    page.page.wait_for_selector("sp-runs table")
    for place in (2, 3):
        page.page.locator("sp-runs tbody input").nth(place).check()
    page.page.locator("sp-runs iframe").nth(1).wait_for()
    page.open("server")
    page.page.wait_for_timeout(1500)
    for _ in range(3):
        page.look("() => document.querySelector('sp-play').start()")
        page.page.wait_for_timeout(1500)


def _shot(page: Watched, path: Path) -> None:
    # Frames are drawn once they were in sight.
    for frame in page.page.locator("iframe:visible").all():
        frame.scroll_into_view_if_needed()
        page.page.wait_for_timeout(200)
    height = page.look("() => document.documentElement.scrollHeight")
    before = page.page.viewport_size or {"width": 1280, "height": 800}
    page.page.set_viewport_size({"width": before["width"], "height": height})
    page.page.wait_for_timeout(200)
    page.page.screenshot(path=path)
    page.page.set_viewport_size(before)


def _write_runs(folder: Path) -> Path:
    generator = random.Random(4)
    for name in _RECIPES:
        write_run(folder / name, generator)
    (folder / "foreign").mkdir()
    (folder / "foreign" / "report.json").write_text("[]")
    return folder


if __name__ == "__main__":
    sys.exit(main())
