from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from calib.corpora import Corpus
from calib.training_text import Measured
from compress.context import RunContext
from compress.quality.figures import Verdict
from compress.recipe import Recipe
from compress.report import kept_quality, verdict_words
from runtime import load
from runtime.model.load import Model

WORDS = ("value", "items", "count", "name", "found", "none", "self")


def corpus() -> Corpus:
    """Thirty documents of short lines."""
    generator = torch.Generator().manual_seed(4)
    documents = []
    for number in range(30):
        picked = torch.randint(len(WORDS), (90, 3), generator=generator).tolist()
        documents.append(f"# {number}\n" + "".join(f"{' '.join(WORDS[i] for i in row)}\n" for row in picked))
    return Corpus("lines", tuple(documents), "0" * 64)


def text(model: Model, tokens: int = 4000) -> Measured:
    return Measured(
        source=None,
        corpus=corpus(),
        tokenizer=model.tokenizer,
        length=200,
        calibration=2,
        evaluation_tokens=tokens,
        seed=0,
        separator=0,
    )


@pytest.fixture(scope="module")
def models(tiny: Callable[..., Path]) -> tuple[Model, Model]:
    return load(tiny("llama")), load(tiny("llama", seed=5))


def context(**options: object) -> RunContext:
    return RunContext.of(Recipe.load("nf4"), eval_tokens=4000, **options)


def test_all_of_it_is_measured(models: tuple[Model, Model]) -> None:
    told: list[tuple[str, int, int]] = []
    asked = context(progress=lambda *step: told.append(step), choices=60, long_context=200)
    found = kept_quality.measure(models, text(models[0]), "int8", asked)
    made, verdict = found.comparison, found.comparison.verdict
    assert made.flips is not None and made.flips.choices == 60 and made.flips.changed > 0
    assert verdict is not None and verdict.blocks >= 10 and verdict.unit == "document"
    assert found.kv_perplexity is not None and found.long_context is not None and found.tasks == []
    # The verdict is of the model as it runs, through its own cache.
    assert verdict.change == pytest.approx(found.kv_perplexity / made.perplexity.original - 1)
    assert verdict.change != pytest.approx(made.perplexity.compressed / made.perplexity.original - 1, rel=1e-6)
    assert {stage for stage, *_ in told} == {"quality", "choices", "long"}
    assert [done for stage, done, _ in told if stage == "choices"] == sorted(
        done for stage, done, _ in told if stage == "choices"
    )
    again = kept_quality.measure(models, text(models[0]), "int8", context(choices=60))
    assert again.comparison == made and again.long_context is None


def test_a_model_is_the_same_as_itself(models: tuple[Model, Model]) -> None:
    made = kept_quality.measure((models[0], models[0]), text(models[0]), "float32", context()).comparison
    assert made.flips is not None and made.flips.choices == 500  # one for eight tokens
    assert (made.flips.lost, made.flips.won, made.flips.changed) == (0, 0, 0)
    assert made.verdict is not None and made.verdict.call == "same"


def test_what_cannot_be_measured_says_why(models: tuple[Model, Model]) -> None:
    found = kept_quality.measure(models, text(models[0]), "float32", context(choices=0))
    assert found.comparison.flips is None and "--choices 0" in found.not_measured["quality.flips"]
    assert found.comparison.verdict is not None
    plain = Corpus("one line", ("no line breaks at all " * 2000,), "1" * 64)
    found = kept_quality.measure(models, replace(text(models[0]), corpus=plain), "float32", context())
    assert "too few lines" in found.not_measured["quality.flips"]
    found = kept_quality.measure(models, text(models[0], tokens=200), "float32", context())
    assert found.comparison.verdict is None and "one window" in found.not_measured["quality.verdict"]


def verdict(**changes: object) -> Verdict:
    figures = {
        "call": "worse",
        "level": 0.05,
        "power": 0.8,
        "change": 0.0103,
        "ci95": (0.0056, 0.0151),
        "blocks": 19,
        "unit": "document",
        "margin": 0.01,
        "choices_margin": 0.02,
        "within_margin": False,
        "smallest_change": 0.0067,
        "by": ["losses"],
        "needs_tokens": None,
        "needs_choices": None,
    }
    return Verdict.model_validate({**figures, **changes})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "worse, +1.03 %"),
        ({"change": 0.003, "within_margin": True}, "worse, +0.30 % (within ±1 %)"),
        ({"call": "better", "change": -0.02}, "better, -2.00 %"),
        ({"by": ["choices"]}, "worse at choices"),
        ({"call": "same", "by": ["losses", "choices"]}, "same within ±1 %"),
        ({"call": "cannot tell", "needs_tokens": 120_000}, "cannot tell: needs 120,000 tokens"),
        (
            {"call": "cannot tell", "needs_tokens": 120_000, "needs_choices": 3100},
            "cannot tell: needs 120,000 tokens and 3,100 choices",
        ),
    ],
)
def test_the_verdict_in_words(changes: dict[str, object], words: str) -> None:
    assert verdict_words.short(verdict(**changes)) == words
    quiet = changes.get("call", "worse") in ("better", "worse") and words[-2:] == " %"
    assert verdict_words.caption(verdict(**changes)) == ("" if quiet else f"{words}; ")
    assert verdict_words.interval(verdict()) == "+0.56 to +1.51 %"
    assert verdict_words.short(None) == "not measured"
