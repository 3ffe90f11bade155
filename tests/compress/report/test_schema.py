import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from compress.errors import UserError
from compress.report import page, speed
from compress.report.files import read_report
from compress.report.not_measured import covers, null_paths, reason_for, unexplained
from compress.report.schema import Report


@pytest.fixture
def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("report_example.json").read_text(encoding="utf-8"))
    return found


# The stable keys, section by section.
KEYS = {
    "": "schema recipe model draft machine versions seed size quality speed lossless calibration left_alone",
    "machine": "cpu cores instruction_path",
    "size": "original_bytes compressed_bytes ratio bits_per_weight kv_bytes_per_token draft_bytes peak_memory_bytes",
    "quality": "corpus protocol perplexity bits_per_byte kl_divergence top1_agreement kv_perplexity layers",
    "speed": "prompts new_tokens repeats threads repeated_4gram_share original compressed speculative baselines "
    "acceptance_rate acceptance_rate_t1 teacher_forced_agreement accepted_by_position tokens_per_round draft_length "
    "draft_cost_ratio width_cost_ratio predicted_speedup iid_speedup speedup groups advice drafter "
    "pairings fastest_drafter mean_draft_length",
    "lossless": "class verify tokens_compared mismatches",
    "calibration": "source samples_requested samples_used tokens experts training",
}


def test_a_complete_report_is_valid_and_written_as_it_was_read(report: dict[str, Any]) -> None:
    found = Report.model_validate(report)
    assert found.speed.advice is not None and found.to_dict() == report


def test_keys_are_written_in_their_order(report: dict[str, Any]) -> None:
    found = Report.model_validate(report).to_dict()
    assert list(found)[:3] == ["schema", "recipe", "model"] and list(found)[-1] == "not_measured"
    assert list(found["quality"])[:2] == ["corpus", "protocol"]
    assert list(found["speed"])[:2] == ["prompts", "new_tokens"] and list(found["speed"])[-1] == "advice"


def test_a_report_that_is_none_says_so(tmp_path: Path) -> None:
    for content, sentence in (('{"schema": 2}', "recipe: "), ('{"schema": 1}', "schema: .*run the recipe again")):
        (tmp_path / "report.json").write_text(content)
        with pytest.raises(UserError, match=rf"report\.json: {sentence}"):
            read_report(tmp_path)


def test_a_report_of_schema_2_is_read(report: dict[str, Any]) -> None:
    for key in ("token_statistics", "flips", "verdict"):
        del report["quality"][key]
    for key in ("mean_error", "median", "p999", "max"):
        del report["quality"]["kl_divergence"][key]
    report["schema"] = 2
    found = Report.model_validate(report)
    assert found.to_dict() == report and found.quality.verdict is None
    assert "Verdict:" not in page.markdown(found) and "KL, 99th percentile" in page.markdown(found)
    report["schema"] = 4
    with pytest.raises(ValidationError, match="schema"):
        Report.model_validate(report)


@pytest.mark.parametrize("section", KEYS)
def test_every_key_must_be_there(report: dict[str, Any], section: str) -> None:
    for key in KEYS[section].split():
        holder = report[section] if section else report
        value = holder.pop(key)
        with pytest.raises(ValidationError, match=key):
            Report.model_validate(report)
        holder[key] = value
    Report.model_validate(report)


def test_unknown_keys_are_refused(report: dict[str, Any]) -> None:
    report["speed"]["tokens_per_minute"] = 7.0
    with pytest.raises(ValidationError, match="tokens_per_minute"):
        Report.model_validate(report)


def test_a_null_needs_a_reason(report: dict[str, Any]) -> None:
    report["size"]["peak_memory_bytes"] = None
    assert unexplained(report) == ["size.peak_memory_bytes"]
    with pytest.raises(ValidationError, match=r"size\.peak_memory_bytes"):
        Report.model_validate(report)
    report["not_measured"]["size.peak_memory_bytes"] = "this system does not tell"
    Report.model_validate(report)


def test_numbers_are_finite(report: dict[str, Any]) -> None:
    report["speed"]["tokens_per_round"] = float("nan")
    with pytest.raises(ValidationError, match="tokens_per_round"):
        Report.model_validate(report)


def test_paths_cover_what_is_below_them() -> None:
    assert covers("speed", "speed.original.ttft_ms")
    assert covers("speed.*.energy_j", "speed.original.energy_j")
    assert not covers("speed.*.energy_j", "speed.original.ttft_ms")
    assert not covers("speed.original.ttft_ms", "speed.original")
    assert not covers("speed.base", "speed.baselines")
    assert list(null_paths({"a": None, "b": [{"c": None}, {"c": 1}], "not_measured": {"a": None}})) == ["a", "b.0.c"]


def test_the_most_specific_reason_counts() -> None:
    reasons = {"speed": "general", "speed.original.energy_j": "specific"}
    assert reason_for(reasons, "speed.original.energy_j") == "specific"
    assert reason_for(reasons, "speed.advice") == "general"
    assert reason_for(reasons, "size.ratio") is None


def test_no_speed_is_valid_with_its_reason(report: dict[str, Any]) -> None:
    nothing = speed.not_measured()
    report |= {"speed": nothing.speed, "lossless": nothing.lossless}
    report["not_measured"] |= nothing.not_measured
    found = Report.model_validate(report)
    assert found.speed.original is None and "--no-speed" in str(found.reason("speed.speedup"))
