"""What Play shows is exact: counts, links, reloads, and that Stop lets the engine go."""

import codecs
import itertools
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browsing import Watched, tab
from tests.runtime.serve.page.counting import SCHEMA, same_counts
from tests.serving import Running, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.page
DRAFTERS = ("lookup+model", "lookup", "suffix", "none")
PROMPTS = [
    "def add(a, b):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "import os\nimport sys\n",
    "for i in range(10):\n",
    "x = 1\ny = 2\n",
    '"""A module of',
    "try:\n    import",
    "été = 'naïve — 日本語 🙂'\nprint(",
    "def fibonacci(n):\n    if n < 2:\n",
    "async def read(self, size=-1):\n",
    "@dataclass\nclass Point:\n    x: int\n",
    "while True:\n    line = file.readline()\n",
    "    return [",
    "raise ValueError(",
    "assertEqual(",
    "# A comment\n# A comment\n# A",
    "a, b = b, a\n" * 3,
    "SELECT = {'a': 1, 'b': 2, 'a': 1, 'b': 2, ",
    "\t\tif not",
    "print('<b>&amp;</b>')\n",
]


def test_coloured_tokens_are_the_engine_s_for_every_drafter(page_with_original: Watched, served: Running) -> None:
    assert len(PROMPTS) == 20
    page, server = page_with_original, served
    page.open("play")
    generator, ghosts = random.Random(), 0
    for drafter in DRAFTERS:
        for prompt in PROMPTS:
            settings = {"temperature": generator.choice(["0", "0.8"]), "seed": str(generator.randrange(2**31))}

            def write(prompt: str = prompt, drafter: str = drafter, settings: dict[str, str] = settings) -> dict:
                return page.play(prompt=prompt, drafter=drafter, max_tokens="48", **settings)

            shown = same_counts(server, write)
            asked = {key: float(value) if key == "temperature" else int(value) for key, value in settings.items()}
            exact = server.post("/v1/completions", prompt=prompt, max_tokens=48, **asked)
            assert shown["text"] == exact["choices"][0]["text"]
            assert drafter != "none" or shown["accepted"] == shown["ghosts"] == 0
            ghosts += shown["ghosts"]
    assert ghosts > 0


def test_pieces_of_tokens_joined_are_the_text_however_bytes_are_cut(page: Watched) -> None:
    page.open("play")
    generator, alphabet = random.Random(), "ab \n\té日🙂—<&"
    align = """async ([events]) => {
      const { Aligner } = await import("/page/tokens.js");
      const aligner = new Aligner();
      const tokens = events.flatMap(([names, text, ended]) =>
        aligner.add(names.map((name) => ({ name })), text, ended));
      return tokens.map((one) => one.text);
    }"""
    for _ in range(200):
        text = "".join(generator.choices(alphabet, k=generator.randrange(60)))
        data, cuts = text.encode(), [0]
        while cuts[-1] < len(data):
            cuts.append(min(len(data), cuts[-1] + generator.randrange(1, 6)))
        parts = [data[a:b] for a, b in itertools.pairwise(cuts)]
        names = [part.decode("utf-8", "replace") for part in parts] + ["<|end|>"]
        decoder, shown = codecs.getincrementaldecoder("utf-8")(), 0
        events = []
        while shown < len(names):
            count = generator.randrange(1, 5)
            text_of = "".join(decoder.decode(part) for part in parts[shown : shown + count])
            events.append((names[shown : shown + count], text_of, shown + count >= len(names)))
            shown += count
        pieces = page.look(align, events)
        assert "".join(pieces) == text and len(pieces) == len(names), (events, pieces)
        whole = [place for place, name in enumerate(names[:-1]) if "\ufffd" not in name]
        assert all("\ufffd" in "".join(names) or pieces[place] == names[place] for place in whole)


def test_what_a_grammar_forces_has_its_own_colour(page: Watched, server: Running) -> None:
    page.open("play")
    for drafter in ("lookup", "grammar", "none"):
        shown = same_counts(server, lambda name=drafter: page.play(drafter=name, schema=SCHEMA, prompt="A thing: "))
        assert (shown["forced"] > 0) == (drafter != "none")


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_a_link_writes_the_same_text_with_all_settings(page: Watched, browser: "Browser", mode: str) -> None:
    page.open("play")
    page.page.check(f"#mode-{mode}")
    settings = {
        "prompt": "def f(x):\n    # ünï 🙂 <b>&\n",
        "temperature": "0.9", "top_p": "0.95", "top_k": "50", "min_p": "0.01",
        "repetition_penalty": "1.1", "presence_penalty": "0.2", "frequency_penalty": "-0.1", "draft_length": "3",
        "logit_bias": '{"5": -100}', "stop": "zzz\nqqq q", "min_tokens": "4", "max_tokens": "40", "verify": "coupled",
        "prediction": "    return x", "cache_salt": "a", "ignore_eos": "1", "drafter": "lookup",
    }  # fmt: skip
    if mode == "chat":
        page.page.fill("#system", "Be short.")
    first = page.play(**settings)
    assert first["tokens"] == 40
    link = page.page.url
    assert f"seed={first['stats']['seed']}" in link
    with tab(browser, page.address) as other:
        other.page.goto(link)
        other.page.wait_for_selector("sp-play h1")
        again = other.play()
    assert again["text"] == first["text"] and other.errors == []
    assert other.foreign == []


def test_a_reload_shows_the_whole_text_and_goes_on(page: Watched, server: Running) -> None:
    page.open("play")
    page.fill(prompt="class Tree:\n", max_tokens="900", seed="11", ignore_eos="1", temperature="0.5")
    page.page.click("sp-play button.main")
    page.page.wait_for_selector("sp-play .t >> nth=40", state="attached")
    before = page.shown()["text"]
    page.page.reload()
    page.page.wait_for_selector("sp-play .t >> nth=40", state="attached")
    assert page.shown()["text"].startswith(before[:100])
    page.wait_done("play", 1)
    shown = page.shown()
    exact = server.post(
        "/v1/completions", prompt="class Tree:\n", max_tokens=900, seed=11, ignore_eos=True, temperature=0.5
    )
    assert shown["tokens"] == 900 and shown["text"] == exact["choices"][0]["text"]
    assert shown["text"].startswith(before)


def test_a_conversation_goes_on(page: Watched) -> None:
    page.open("play")
    page.page.check("#mode-chat")
    first = page.play(prompt="Hello", max_tokens="12", seed="4")
    page.page.get_by_role("button", name="Reply").click()
    assert page.page.locator("sp-play .talk li").all_inner_texts()[1].endswith(first["text"].strip())
    page.play(prompt="And then?")
    assert page.page.locator("sp-play .talk li").count() == 2 and page.shown()["tokens"] > 0


def test_stop_frees_the_pages_within_two_rounds(browser: "Browser", tmp_path: Path, pair: tuple[Path, Path]) -> None:
    # The slow kernels: a round takes long enough that one after Stop is told from two.
    with (
        running(
            tmp_path, [f"pair={pair[0]}"], "--kernels", "reference", "--drafter", "none", "--threads", "1"
        ) as server,
        tab(browser, server.address) as page,
    ):
        page.open("play")
        page.fill(max_tokens="900", ignore_eos="1")
        page.page.click("sp-play button.main")
        # Few tokens: the reference kernels write about two a second, and "Go on" writes all of them again.
        page.page.wait_for_selector("sp-tokens .t >> nth=4", state="attached")
        held = server.engine()["pages_used"]
        page.page.get_by_role("button", name="Stop").click()
        idle = server.wait_idle()
        shown = page.shown()
        assert held > 0 and idle["pages_used"] == 0
        # A token a round: one may have been on its way to the page.
        assert shown["tokens"] <= server.metric("vllm:generation_tokens_total") <= shown["tokens"] + 2
        assert "Stopped" in shown["notice"]
        page.page.get_by_role("button", name="Go on").click()
        page.page.wait_for_selector(f"sp-tokens .t >> nth={shown['tokens'] + 1}", state="attached")
        assert page.shown()["text"].startswith(shown["text"])
