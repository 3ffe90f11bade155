"""Beam search against all texts there are, and against transformers' own."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.engine.beam import Beam, beam_search
from runtime.errors import UserError

Fake = Callable[..., Any]
LETTERS = 4


@pytest.fixture
def small(fake: Fake) -> Callable[..., Any]:
    """small(seed, stop_bias): a model that only ever continues with the ids 0 to 3."""

    def make(seed: int = 0, stop_bias: float = 0.0) -> Any:
        model = fake(seed, end_tokens=[0])
        law = model.decoder.law

        def masked(context: tuple[int, ...]) -> np.ndarray:
            logits = np.full(320, -np.inf)
            logits[:LETTERS] = law(context)[:LETTERS] / 3
            logits[0] += stop_bias
            return logits

        model.decoder.law = masked
        return model

    return make


def log_probability(model: Any, prompt: list[int], tokens: tuple[int, ...]) -> float:
    text, total = list(prompt), 0.0
    for token in tokens:
        # As the decoder gives them: float32.
        logits = torch.tensor(model.decoder.law(tuple(text[-3:])), dtype=torch.float32).double()
        total += float(logits.log_softmax(-1)[token])
        text.append(token)
    return total


def every_text(model: Any, prompt: list[int], length: int, penalty: float) -> list[tuple[tuple[int, ...], float]]:
    """All texts that end with token 0 or at `length`, with their scores, best first."""
    texts = []
    for size in range(1, length + 1):
        for tokens in itertools.product(range(LETTERS), repeat=size):
            if 0 not in tokens[:-1] and (tokens[-1] == 0 or size == length):
                texts.append((tokens, log_probability(model, prompt, tokens) / size**penalty))
    return sorted(texts, key=lambda one: -one[1])


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_texts(
    small: Callable[..., Any], seed: int, penalty: float
) -> None:
    model, prompt = small(seed), [5, 6, 7]
    expected = every_text(model, prompt, 4, penalty)
    # 27 texts of three letters that go on: nothing is ever cut.
    found = beam_search(model, prompt, 64, 4, length_penalty=penalty, early_stopping="never")
    assert [tuple(beam.tokens) for beam in found] == [tokens for tokens, _ in expected[:64]]
    np.testing.assert_allclose([beam.score for beam in found], [value for _, value in expected[:64]], rtol=1e-9)
    # A narrow one is a search, not an enumeration: it finds good texts, in order, with true scores.
    narrow = beam_search(model, prompt, 3, 4, length_penalty=penalty, early_stopping="never")
    scores = dict(expected)
    assert [beam.score for beam in narrow] == pytest.approx([scores[tuple(beam.tokens)] for beam in narrow])
    assert [beam.score for beam in narrow] == sorted((beam.score for beam in narrow), reverse=True)
    assert len(narrow) == 3 and narrow[0].score <= found[0].score + 1e-12


def test_one_beam_is_greedy_decoding(fake: Fake) -> None:
    from runtime.speculate import Speculator

    model = fake(0)
    [expected] = Speculator(model).generate([[5, 6, 7]], 30)
    [found] = beam_search(model, [5, 6, 7], 1, 30)
    assert (found.tokens, found.text) == (expected.tokens, expected.text)
    wide = beam_search(model, [5, 6, 7], 8, 30)
    assert wide[0].score > found.score and wide[0].tokens != found.tokens


def test_all_beams_share_a_forward_and_their_caches_are_freed(fake: Fake) -> None:
    model = fake(0)
    beam_search(model, [5] * 600, 4, 6, stop=())
    assert model.decoder.widths == [512, 88, 4, 4, 4, 4, 4]
    assert all(not cache.slots for cache in model.decoder.caches)
    law, calls = model.decoder.law, itertools.count()

    def failing(context: tuple[int, ...]) -> np.ndarray:
        return law(context) * (float("nan") if next(calls) == 9 else 1.0)

    model.decoder.law = failing
    with pytest.raises(UserError, match="target's logits must be finite"):
        beam_search(model, [5, 6], 4, 6)
    assert all(not cache.slots for cache in model.decoder.caches)


def test_a_stop_token_ends_a_beam_and_is_not_shown(small: Callable[..., Any]) -> None:
    model = small(1, stop_bias=1.0)
    found = beam_search(model, [5, 6, 7], 4, 12)
    assert all(beam.tokens[-1] == 0 and 0 not in beam.tokens[:-1] for beam in found)
    assert len({tuple(beam.tokens) for beam in found}) == 4
    for beam in found:
        assert beam.text == model.tokenizer.decode(beam.tokens[:-1])
    assert all(len(beam.tokens) == 12 for beam in beam_search(model, [5, 6, 7], 4, 12, stop=()))
    other = beam_search(model, [5, 6, 7], 4, 12, stop=[2])
    assert any(0 in beam.tokens[:-1] for beam in other) and all(2 not in beam.tokens[:-1] for beam in other)


def test_early_stopping_saves_steps(small: Callable[..., Any]) -> None:
    steps = {}
    for early in (True, False, "never"):
        model = small(3)
        found = beam_search(model, [5, 6, 7], 3, 40, length_penalty=0.3, early_stopping=early)
        assert len(found) == 3
        steps[early] = len(model.decoder.widths)
    assert steps[True] < steps[False] < steps["never"]


def by_transformers(path: Path, prompt: list[int], **options: Any) -> list[tuple[list[int], float]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = options.pop("eos_token_id")
    out = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        num_return_sequences=options["num_beams"],
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        **options,
    )
    texts = []
    for row, value in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        new = row[len(prompt) :]
        ends = [i for i, token in enumerate(new) if token in model.generation_config.eos_token_id]
        texts.append((new[: ends[0] + 1] if ends else new, value))
    return texts


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize(
    ("beams", "penalty", "early"),
    [(2, 1.0, False), (5, 1.0, True), (4, 0.0, "never"), (4, 2.5, False), (3, -1.0, True)],
)
def test_the_beams_are_transformers_beams(
    tiny: Callable[..., Path], kind: str, beams: int, penalty: float, early: Any
) -> None:
    """With several frequent stop tokens, so that beams end at different lengths."""
    from runtime import load

    path, prompt = tiny(kind), [5, 90, 17, 33, 8]
    model = load(path)
    unstopped = beam_search(model, prompt, beams, 20, penalty, early, stop=())
    stops = sorted({beam.tokens[i] for beam, i in zip(unstopped * 2, (3, 6, 9, 12), strict=False)})
    settings = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early, "eos_token_id": stops}
    expected = by_transformers(path, prompt, max_new_tokens=20, **settings)
    found = beam_search(model, prompt, beams, 20, penalty, early, stop=stops)
    assert [beam.tokens for beam in found] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([beam.score for beam in found], [value for _, value in expected], rtol=2e-5)
    assert all(beam.tokens not in [other.tokens for other in unstopped] for beam in found)


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_a_fork_and_its_origin_do_not_touch_each_other(
    tiny: Callable[..., Path], text: Callable[..., torch.Tensor], kind: str
) -> None:
    from runtime import load
    from runtime.contract import Rows

    decoder = load(tiny("llama")).decoder
    tokens = text(70)
    one, other = text(5, seed=1), text(5, seed=2)

    def after(*parts: torch.Tensor) -> torch.Tensor:
        cache = decoder.new_cache(kind)  # type: ignore[call-arg]
        handle, at = cache.open(80), 0
        for part in parts:
            out = decoder.forward(part, Rows.chains([(handle, at, len(part))]), cache).logits
            at += len(part)
        return out

    cache = decoder.new_cache(kind)  # type: ignore[call-arg]
    first = cache.open(80)
    decoder.forward(tokens, Rows.chains([(first, 0, 70)]), cache)
    second = cache.fork(first)
    assert second != first and cache.length(second) == 70
    rows = Rows.chains([(first, 70, 5), (second, 70, 5)])
    out = decoder.forward(torch.cat([one, other]), rows, cache).logits
    assert torch.equal(out, torch.cat([after(tokens, one), after(tokens, other)]))
    cache.close(first)
    cache.truncate(second, 70)
    again = decoder.forward(one, Rows.chains([(second, 70, 5)]), cache).logits
    assert torch.equal(again, after(tokens, one))


def test_user_mistakes(fake: Fake) -> None:
    model = fake(0, max_positions=30)
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"beams": 0}, "beams must be from 1 to 64, but is 0"),
        ({"beams": 65}, "beams must be from 1 to 64, but is 65"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number"),
        ({"early_stopping": "soon"}, "early_stopping must be True, False or 'never'"),
        ({"stop": ["text"]}, "beam search stops at token ids only"),
        ({"stop": [320]}, "stop holds token 320"),
        ({"prompt": []}, "prompt must hold"),
        ({"prompt": [1] * 30}, "30 tokens, but the target has 30 positions"),
    ]
    for options, message in mistakes:
        with pytest.raises(UserError, match=message):
            beam_search(model, **{"prompt": [1, 2], "max_new_tokens": 3, **options})
    found = beam_search(model, [1] * 28, 2, 100)
    assert all(isinstance(beam, Beam) and len(beam.tokens) == 2 for beam in found)
