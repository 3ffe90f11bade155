"""Compare, held to what a script finds of the same two models."""

from pathlib import Path

import pytest
import torch

from compress.logits import kl_rows, log_probabilities
from runtime import Speculator, load
from runtime.contract import Rows
from tests.browsing import Watched
from tests.serving import Running

pytestmark = pytest.mark.page
PROMPTS = ("def add(a, b):\n", "class Stack:\n", "import os\n", "x = [1, 2", "été = '🙂")
TEXT = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\nπ = 3.14  # 🙂\n" * 12


def test_the_first_divergence_is_the_one_that_a_script_finds(
    page_with_original: Watched, pair: tuple[Path, Path]
) -> None:
    texts = [Speculator(load(path, threads=1)) for path in pair]
    page = page_with_original.open("compare")
    for prompt in PROMPTS:
        written = [one.generate([prompt], max_new_tokens=64)[0].tokens for one in texts]
        first = next((i for i, (a, b) in enumerate(zip(*written, strict=False)) if a != b), None)
        page.page.locator("sp-compare").get_by_label("Prompt").fill(prompt)
        page.page.locator("sp-compare").get_by_label("Max tokens").fill("64")
        page.press("compare", "Write both")
        said = page.page.locator("sp-compare .result").first.inner_text()
        assert said.startswith(f"The first {first} tokens are the same" if first is not None else "The two texts are")
        assert first is None or page.page.locator("sp-compare mark").count() >= 1


def test_the_divergence_of_each_position_is_the_scripts_whatever_the_engine_writes_meanwhile(
    served: Running, pair: tuple[Path, Path]
) -> None:
    target, draft = (load(path, threads=1) for path in pair)
    tokens = target.tokenizer(TEXT)["input_ids"]
    assert 256 < len(tokens) < 1024  # several pieces

    def log_probs(model: object) -> torch.Tensor:
        decoder = model.decoder  # type: ignore[attr-defined]
        cache = decoder.new_cache()
        rows = Rows.chains([(cache.open(len(tokens)), 0, len(tokens))])
        return log_probabilities(decoder.forward(torch.tensor(tokens), rows, cache).logits)[:-1]

    expected = kl_rows(log_probs(draft), log_probs(target))
    found = served.post("/compare", model="pair", text=TEXT)
    values = [one["kl"] for one in found["positions"]]
    assert values[0] is None and values[1:] == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-9)
    assert found["mean_kl"] == pytest.approx(float(expected.mean()))
    assert "".join(one["text"] for one in found["positions"]) == TEXT


def test_texts_that_cannot_be_compared_are_refused_in_a_sentence(served: Running) -> None:
    for text, word in (("a", "2 to"), ("x y " * 2000, "2 to"), ("\ud800 a", "surrogate")):
        told = served.ask("POST", "/compare", {"text": text})
        assert told.status == 400 and word in told.json()["error"]["message"]
    same = served.ask("POST", "/compare", {"text": "a b c", "model": "original"})
    assert same.status == 400 and "another model" in same.json()["error"]["message"]
