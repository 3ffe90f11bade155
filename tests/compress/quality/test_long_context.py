from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from calib import corpora
from compress.errors import UserError
from compress.quality.long_context import by_position, long_windows, make_needles, measure
from runtime import load
from runtime.contract import Rows
from runtime.model.hf_adapter import adapt


def windows(count: int = 2, length: int = 250) -> torch.Tensor:
    return torch.randint(1, 250, (count, length), generator=torch.Generator().manual_seed(2))


def test_perplexity_by_position_is_that_of_one_forward(tiny: Callable[..., Path]) -> None:
    decoder, text = load(tiny("llama")).decoder, windows()
    losses = []
    for tokens in text:
        cache = decoder.new_cache()
        rows = Rows.chains([(cache.open(len(tokens)), 0, len(tokens))])
        log_p = decoder.forward(tokens, rows, cache).logits.double().log_softmax(-1)
        losses.append(-log_p[:-1].gather(1, tokens[1:, None])[:, 0])
    mean = torch.stack(losses).mean(0)
    found = by_position(decoder, text, "float32")
    assert [(one.first, one.last, one.tokens) for one in found] == [(1, 63, 126), (64, 127, 128), (128, 249, 244)]
    for one in found:
        assert one.perplexity == pytest.approx(float(mean[one.first - 1 : one.last].mean().exp()), rel=1e-5)


def test_needles_are_texts_that_end_with_their_question(tiny: Callable[..., Path]) -> None:
    tokenizer, text = load(tiny("llama")).tokenizer, windows(length=400)
    found = make_needles(text, tokenizer, seed=3, tries=2)
    assert [one.length for one in found] == [100] * 6 + [200] * 6 + [400] * 6
    for one in found:
        assert len(one.tokens) == one.length
        line = tokenizer.decode(one.tokens[-20:]).rsplit("\n", 1)[1]
        value = tokenizer.decode(one.tokens[-one.count :]).strip()
        assert line.startswith("key_") and line.endswith(f"= {value}") and len(value) == 5
        written = tokenizer.decode(one.tokens)
        assert written.count(line) == 2
        assert abs(written.index(line) / written.rindex(line) - one.depth) < 0.25
    again = make_needles(text, tokenizer, seed=3, tries=2)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(found, again, strict=True))
    with pytest.raises(UserError, match="expected room for needles in texts of 16 tokens"):
        make_needles(text[:, :64], tokenizer, seed=3)


class Copier:
    """A decoder that continues a text as it went on where its last tokens stood before: it finds every needle."""

    vocab_size, max_positions, no_trees = 320, 4096, ""

    def __init__(self, decoder: object, broken: bool = False) -> None:
        self._decoder, self.broken, self.seen = decoder, broken, list[int]()

    def new_cache(self, kind: str) -> "Copier":
        self.seen = []
        return self

    def open(self, capacity: int) -> int:
        return 0

    def close(self, request: int) -> None:
        self.seen = []

    def forward(self, tokens: torch.Tensor, rows: Rows, cache: "Copier", at: torch.Tensor) -> object:
        self.seen += tokens.tolist()
        logits = torch.zeros(len(at), self.vocab_size)
        for i, row in enumerate((len(self.seen) - len(tokens) + at).tolist()):
            tail = self.seen[row - 5 : row + 1]
            places = [p for p in range(6, row) if self.seen[p - 5 : p + 1] == tail]
            if places and not self.broken:
                logits[i, self.seen[places[-1] + 1]] = 9.0
        return type("Out", (), {"logits": logits})()


def test_a_model_that_copies_finds_them_and_another_does_not(tiny: Callable[..., Path]) -> None:
    model = load(tiny("llama"))
    needles = make_needles(windows(length=240), model.tokenizer, seed=1, tries=2)
    found = measure(Copier(model), Copier(model, broken=True), windows(length=240), needles, ["int8"])
    rows = {row.model: row for row in found.rows}
    assert all(one.found == one.tries == 2 for one in rows["original"].needles)
    assert all(one.found == 0 for one in rows["compressed"].needles)
    assert rows["original"].needles[0].log_likelihood > -0.1 > -5 > rows["compressed"].needles[0].log_likelihood


def test_every_kind_of_cache_is_a_row_or_says_why_not(tiny: Callable[..., Path]) -> None:
    path = tiny("llama")
    model, text = load(path), windows(length=240)
    needles = make_needles(text, model.tokenizer, seed=1, tries=1)
    adapter = adapt(path, AutoConfig.from_pretrained(path), torch.device("cpu"))
    steps: list[tuple[int, int]] = []
    found = measure(model.decoder, model.decoder, text, needles, on_step=lambda *step: steps.append(step))
    assert [(row.model, row.cache) for row in found.rows][1:] == [
        ("compressed", kind) for kind in ("float32", "float16", "int8", "int4")
    ]
    assert steps[-1] == (5, 5) and found.rows[0].buckets == found.rows[1].buckets
    # Float16 is for GPUs. The fewer bits, the further from float32.
    assert "float16" in str(found.rows[2].why) and not found.rows[2].buckets
    int8, int4 = (row.buckets[-1].perplexity / found.rows[1].buckets[-1].perplexity - 1 for row in found.rows[3:])
    assert 0 < abs(int8) < abs(int4)
    other = measure(adapter, adapter, text, needles, ["float32", "int4"])
    assert other.rows[1].why is None and other.rows[2].why and not other.rows[2].buckets


def test_windows_are_of_the_text_and_long_enough(tiny: Callable[..., Path]) -> None:
    tokenizer, corpus = load(tiny("llama")).tokenizer, corpora.load()
    found = long_windows(corpus, tokenizer, 200, 0, 0)
    assert found.shape == (8, 200)
    with pytest.raises(UserError, match="at least 64 tokens, found 63"):
        long_windows(corpus, tokenizer, 63, 0, 0)
