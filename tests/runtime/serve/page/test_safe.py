"""Text is text: nothing that a model, a link or a run's file says becomes markup, and no request leaves the host."""

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest

from tests.browsing import Watched, tab
from tests.runtime.serve.page.payloads import PAYLOADS
from tests.runtime.serve.run_folders import write_run
from tests.serving import Running, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.page
# What a payload would leave behind if it had become markup; frames and forms of the page's own are left out.
_FOREIGN_NODES = (
    "script:not([src^='/page/']), img, body > svg, object, embed, base, meta[http-equiv], video, audio, marquee,"
    " template, form[action], iframe:not([sandbox=''])"
)


def harmless(page: Watched) -> None:
    """Nothing has run, nothing is there that the page did not make itself, nothing was asked of another host."""
    assert page.look("() => window.ran ?? 0") == 0
    assert page.page.locator(_FOREIGN_NODES).count() == 0
    if page.foreign:
        page.page.wait_for_timeout(200)  # until it is told that the policy stopped it
    assert page.foreign == []


def test_a_payload_that_becomes_markup_would_be_noticed(browser: "Browser") -> None:
    # The positive: on a page without a policy, of HTML that is put in as such.
    with tab(browser, "http://127.0.0.1:1") as page:
        page.page.set_content("<div id=x></div>")
        for payload in (one for one in PAYLOADS if "http-equiv" not in one):  # which leaves the page
            page.look("([html]) => document.querySelector('#x').insertAdjacentHTML('beforeend', html)", payload)
        page.page.wait_for_timeout(500)
        assert page.look("() => window.ran") > 3 and page.foreign
        assert page.page.locator(_FOREIGN_NODES).count() > 10


def test_what_a_model_writes_stays_text(page: Watched) -> None:
    assert len(PAYLOADS) == len(set(PAYLOADS)) == 50
    page.open("play")
    for payload in PAYLOADS:
        shown = page.play(prompt=payload, schema=json.dumps({"const": payload}), max_tokens="200", drafter="grammar")
        assert json.loads(shown["text"]) == payload
        page.page.locator("sp-play .t >> nth=1").focus()
        harmless(page)


def test_links_and_conversations_stay_text(page: Watched) -> None:
    page.open("play")
    for payload in PAYLOADS:
        history = json.dumps([{"role": payload, "content": payload}])
        asked = {
            "mode": "chat",
            "prompt": payload,
            "system": payload,
            "history": history,
            "model": payload,
            "seed": "1",
        }
        page.page.goto(f"{page.address}/#play?{urlencode(asked)}")
        page.page.wait_for_selector("sp-play .talk li")
        assert page.page.input_value("#prompt") == payload
        assert page.page.locator("sp-play .talk p").inner_text() == payload
        harmless(page)


def test_names_and_reports_of_runs_stay_text(browser: "Browser", tmp_path: Path, pair: tuple[Path, Path]) -> None:
    folder, generator = tmp_path / "runs", random.Random(3)
    for place, payload in enumerate(PAYLOADS):
        run = write_run(
            folder / payload.replace("/", "∕")[:80] / str(place),
            generator,
            recipe=payload,
            model=payload,
            draft=payload,
            machine={"cpu": payload},
            versions={"specpress": payload},
            lossless={"class": payload, "mismatches": payload},
            schema=payload,
        )
        (run / "recipe.yaml").write_text(payload)
        (run / "report.html").write_text(f"<!doctype html><p>{payload}<script>parent.ran=1;top.ran=1</script>")
    with (
        running(tmp_path / "s", [f"pair={pair[1]}"], "--runs", str(folder)) as server,
        tab(browser, server.address) as page,
    ):
        page.open("runs")
        page.page.wait_for_selector("sp-runs table")
        names = page.page.locator("sp-runs [aria-label=Runs] tbody th").all_inner_texts()
        assert len(names) == len(PAYLOADS)
        for number in range(len(names)):
            box = page.page.locator("sp-runs [aria-label=Runs] tbody input").nth(number)
            box.check()
            page.page.locator("sp-runs figcaption", has_text="report.html").first.wait_for()
            harmless(page)
        page.page.wait_for_timeout(1000)
        harmless(page)
        assert page.page.locator("sp-runs iframe").count() == 2


def test_a_report_s_address_is_of_no_use_without_its_ticket_and_names_become_no_path(server: Running) -> None:
    ticket = server.ask("GET", "/run?name=nf4").json()["ticket"]
    report = server.ask("GET", f"/run-report?name=nf4&ticket={ticket}")
    assert report.status == 200 and b"Report" in report.body
    assert (
        "sandbox" in report.headers["content-security-policy"]
        and "script" not in report.headers["content-security-policy"]
    )
    for query in (f"name=int8&ticket={ticket}", "name=nf4&ticket=", "name=nf4", "name=../x&ticket=%ff%00"):
        assert server.ask("GET", f"/run-report?{query}").status == 403
    for name in ("..", "../..", "/etc", "nf4/..", "nf4/../int8", "%2e%2e", "nf4/model", "", "nf4\0", "~"):
        answer = server.ask("GET", f"/run?{urlencode({'name': name})}")
        assert answer.status == 404 and "no run of this name" in answer.json()["error"]["message"]
    for path in ("/page/../guard.py", "/page/%2e%2e/guard.py", "/page/..%2fguard.py", "/page/__init__.py", "/page/"):
        assert server.ask("GET", path).status in (404, 405)
