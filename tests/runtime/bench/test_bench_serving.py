"""`runtime.bench speculate` and `load`, run as a user runs them, on tiny random models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from runtime.bench.__main__ import app

SMALL = ("--shape", "pair", "--count", 2, "--new-tokens", 8, "--threads", 1)


def command(*arguments: object) -> Any:
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "options",
    [
        ("--drafter", "lookup", "--scheme", "int8"),
        ("--drafter", "nested", "--scheme", "int8", "--draft-length", 2),
        ("--drafter", "oracle", "--draft", "pair", "--alpha", 1.0, "--draft-length", 3),
        ("--drafter", "model", "--draft", "pair", "--draft-length", 2),
        ("--drafter", "lookup+suffix", "--batch", 2, "--temperature", 0.7),
        ("--drafter", "oracle+nested", "--scheme", "int8", "--alpha", 1.0, "--draft-length", 3),
        ("--drafter", "oracle+block", "--rates", "1,1", "--draft-length", 3),
    ],
)
def test_speculate(tmp_path: Path, options: tuple[object, ...]) -> None:
    result = command("speculate", *SMALL, "--rounds", 2, "--json", tmp_path / "out.json", *options)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["random_weights"] and found["threads"] == 1 and found["result"]["mismatches"] == 0
    assert found["result"]["prompts"] == 2 and found["result"]["new_tokens"] == 16
    assert "random weights: speed only" in result.stdout and "0 of 2 texts differ" in result.stdout
    if {"oracle", "oracle+nested", "oracle+block"} & set(options):
        assert found["result"]["acceptance_rate"] == 1.0 and found["result"]["predicted_speedup"] > 0


def test_load(tmp_path: Path) -> None:
    result = command(
        "load", *SMALL, "--drafter", "lookup", "--rate", 50, "--requests", 6, "--max-latency", 30,
        "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found["result"]) == {"plain", "lookup"} and found["bound_ms"] == {"latency_ms": 30000, "ttft_ms": None}
    for one in found["result"].values():
        # Each rate held, so it was doubled as often as it may.
        assert one["highest_rate"] == one["runs"][-1]["rate"] >= 50
        assert all(run["requests"] == 6 and run["tokens_per_second"] > 0 for run in one["runs"])
    assert "highest rate under the bound" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("speculate",), "name either a --target or a --shape"),
        (("speculate", "--shape", "pair", "--target", "x"), "name either a --target or a --shape"),
        (("speculate", "--shape", "gpt-9"), "shape 'gpt-9' is unknown"),
        (("speculate", "--target", "nowhere/at-all/of-it"), "nowhere/at-all/of-it"),
        (("speculate", "--shape", "pair", "--drafter", "model"), "needs a draft"),
        (("speculate", "--shape", "pair", "--drafter", "oracle"), "needs a draft"),
        (("speculate", "--shape", "pair", "--drafter", "lookup", "--draft", "pair"), "leave out one of the two"),
        (("speculate", "--shape", "pair", "--drafter", "guess"), "drafter must be one of"),
        (("speculate", "--shape", "pair", "--drafter", "oracle", "--draft", "pair", "--alpha", 2), "from 0 to 1"),
        (("speculate", "--shape", "pair", "--drafter", "oracle+block", "--rates", "1,x"), "--rates: expected numbers"),
        (("speculate", "--shape", "pair", "--drafter", "oracle+block", "--rates", "1.5"), "from 0 to 1"),
        (("speculate", "--shape", "pair", "--drafter", "lookup", "--rates", "1"), "--rates is for"),
        (("speculate", "--shape", "pair", "--draft-length", 65), "from 0 to 64, found 65"),
        (("speculate", "--shape", "pair", "--batch", 0), "--batch must be at least 1"),
        (("speculate", "--shape", "pair", "--verify", "typical"), "--verify must be coupled or rejection"),
        (("speculate", "--shape", "pair", "--prompts", "missing.jsonl"), "missing.jsonl cannot be read"),
        (("speculate", "--shape", "pair", "--json", "no/folder/x.json"), "cannot be a file"),
        (("load", "--rate", 0, "--shape", "pair"), "--rate must be above 0"),
        (("load", "--rate", 1, "--shape", "pair", "--max-ttft", -1), "--max-ttft must be above 0"),
        (("load", "--rate", 1, "--shape", "pair", "--requests", 0), "--requests must be at least 1"),
        (("load", "--rate", 1e-9, "--shape", "pair", "--requests", 1), "a run may take 3600"),
        (("speculate", "--shape", "pair", "--json", "/dev/null"), "cannot be a file"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: tuple[object, ...], message: str) -> None:
    result = command(*arguments)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and message in result.stderr
