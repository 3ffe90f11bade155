from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compress.report import baselines

PROMPTS = [[5, 80, 41, 7, 9], [101, 33, 200]]


def job(path: Path, draft: Path | None = None, new_tokens: int = 4) -> baselines.Job:
    return baselines.Job(str(path), draft and str(draft), PROMPTS, new_tokens, 3, 1)


def test_a_row_is_measured_or_says_why(tiny: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny("llama")
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    good = baselines._guarded("transformers, eager", model, job(path), {})
    assert good.tokens_per_second > 0 and good.why is None and good.new_tokens == 4
    bad = baselines._guarded("transformers, eager", model, job(path), {"cache_implementation": "no such cache"})
    assert bad.tokens_per_second is None
    assert bad.why.startswith("ValueError: ") and "\n" not in bad.why


def test_what_takes_too_long_is_ended_and_said(tiny: Callable[..., Path]) -> None:
    rows = baselines.run(job(tiny("llama")), limit=0.5)
    assert [row.name for row in rows] == baselines.names(has_draft=False)
    assert {row.why for row in rows} == {"did not finish within 0 seconds"}


def test_a_broken_model_is_a_reason_in_every_row(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    rows = baselines.run(job(tmp_path))
    assert all(row.tokens_per_second is None and "the process ended: " in row.why for row in rows)


def test_a_model_that_memory_cannot_hold_is_not_loaded(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 42)  # sparse: takes no space
    rows = baselines.run(job(tmp_path, tmp_path))
    assert [row.name for row in rows] == baselines.names(has_draft=True)
    assert all("a float32 copy would take" in row.why for row in rows)


def test_only_the_asked_rows_are_measured(tiny: Callable[..., Path]) -> None:
    asked = job(tiny("llama"))
    assert baselines.run(replace(asked, rows=0)) == []
    rows = baselines.run(replace(asked, rows=1))
    assert [(row.name, row.why) for row in rows] == [("transformers, eager", None)]
    assert rows[0].tokens_per_second > 0


@pytest.mark.slow
def test_all_rows_in_a_child_process(tiny: Callable[..., Path]) -> None:
    rows = baselines.run(job(tiny("llama"), tiny("llama", seed=1), 8), limit=240)
    assert [row.why for row in rows] == [None] * 3
    assert all(row.tokens_per_second > 0 for row in rows)
