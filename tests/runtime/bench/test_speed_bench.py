"""SPEED-Bench's protocol: what it counts, the files in its harness's layout, and what it is not measured on."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runtime.bench.__main__ import app
from runtime.bench.prompts import read_prompts
from runtime.bench.speculate import Item
from runtime.bench.speed_bench import chunk_lengths, long_items, marginal, trimmed
from runtime.engine.metrics import Metrics
from runtime.errors import UserError

PAIR = Path(__file__).parents[3] / "examples" / "pair"
TEXTS = {
    "code": ["def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n", "class Stack:\n    def push(self, item):\n"],
    "repeating": ["import os\n" * 12, "x = [1, 2, 3]\n" * 10],
}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text, "category": name} for name, texts in TEXTS.items() for text in texts]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["speculate", "--protocol", "speed-bench", *words])


def test_rounds_are_told_apart_by_when_their_tokens_came() -> None:
    metrics = Metrics(arrivals=[[0.5, 0.7, 0.7, 0.7, 0.9, 1.0, 1.0]])
    assert chunk_lengths(metrics) == [1, 3, 1, 2]
    assert trimmed([1, 3, 1, 2]) == [3, 1]
    assert trimmed([4, 3, 2]) == [4, 3]
    assert trimmed([1, 4]) == trimmed([1]) == trimmed([]) == [1]


def test_acceptance_by_position_is_the_share_of_rounds_that_went_so_far() -> None:
    drawn = random.Random(0)
    lengths = [drawn.randint(1, 4) for _ in range(500)]
    found = marginal(lengths)
    counts = Counter(lengths)
    assert found == [sum(counts[n] for n in range(at + 1, 5)) / 500 for at in range(1, 4)]
    assert 1 + sum(found) == pytest.approx(sum(lengths) / 500)


def test_long_inputs_have_their_length_and_no_prompt_twice() -> None:
    items = [Item(list(range(100 * i, 100 * i + 37)), f"group {i}") for i in range(5)]
    for one in long_items(items, 100, 20, 3):
        assert len(one.tokens) == len(set(one.tokens)) == 100
        assert one.group == f"group {one.tokens[-1] // 100}" and one.tokens[-1] % 100 == 36
    assert len({tuple(one.tokens) for one in long_items(items, 100, 20, 3)}) > 5
    with pytest.raises(UserError, match="all prompts together have 185 tokens, an input of 186 takes more"):
        long_items(items, 186, 1, 0)


def test_a_run_writes_what_its_harness_writes(prompts: Path, tmp_path: Path) -> None:
    out, table = tmp_path / "out", tmp_path / "table.json"
    small = ["--target", str(PAIR / "target"), "--drafter", "lookup", "--prompts", str(prompts), "--new-tokens", "40"]
    small += ["--lengths", "64,2048", "--concurrency", "1,3", "--rounds", "1", "--json", str(table), "--out", str(out)]
    found = run(*small)
    assert found.exit_code == 0, found.output
    assert "inputs of 2048 tokens are left out: the model has 1024 positions" in found.stderr
    cells = {f"{path.parent.name}/{path.name}" for path in out.glob("*/*")}
    assert cells == {"qualitative/concurrency_1", "throughput_64/concurrency_1", "throughput_64/concurrency_3"}
    rows = json.loads(table.read_text())["rows"]
    assert [row["mismatches"] for row in rows] == [0, 0, 0] and [row["input_tokens"] for row in rows][1:] == [64, 64]
    for path in out.glob("*/*"):
        (said,) = json.loads((path / "acceptance_rate.json").read_text())
        counts = {int(n): count for n, count in said["Acceptance_Length_Histogram"].items()}
        rounds, whole = sum(counts.values()), sum(n * count for n, count in counts.items())
        joint = [said["Joint_Acceptance_Rate"][str(n)] for n in range(1, max(counts) + 1)]
        assert sum(joint) == pytest.approx(whole / rounds) and joint[0] == 1
        product = 1.0
        for n, share in enumerate(joint, 1):
            product *= said["Conditional_Acceptance_Rate"][str(n)]
            assert product == pytest.approx(share)
        profile = json.loads((path / "speculation_profile.json").read_text())
        assert profile["validation"]["mean_consistency"]["passed"] and len(profile["marginal_accept_rates"]) == 3
        (timing,) = json.loads((path / "timing.json").read_text())
        assert float(timing["Number of Output Tokens"]["min"]) == 40 and timing["Output TPS"] > 0
        assert 0 < float(timing["TTFT Time"]["min"]) <= float(timing["E2E Request Time"]["max"])
        lines = [json.loads(line) for line in (path / "responses.jsonl").read_text().splitlines()]
        assert len(lines) == len(said["Request_AL"]) and all(line["choices"][0]["turns"][0] for line in lines)
    (said,) = json.loads((out / "qualitative" / "concurrency_1" / "acceptance_rate.json").read_text())
    # The drafter copies: what repeats itself is accepted more.
    assert said["Category_AL"]["repeating"] > said["Category_AL"]["code"]
    again = run(*small)
    assert again.exit_code == 2 and "is there already; name a new folder" in again.stderr


def test_what_it_is_not_measured_on(prompts: Path) -> None:
    for words, sentence in (
        (["--shape", "tinyllama-tenth", "--prompts", str(prompts)], "needs a --target and real --prompts"),
        (["--target", str(PAIR / "target")], "on random ones drafts are accepted otherwise"),
        (["--target", str(PAIR / "target"), "--prompts", str(prompts), "--temperature", "1"], "is greedy"),
        (["--target", str(PAIR / "target"), "--prompts", str(prompts), "--protocol", "mine"], "must be speed-bench"),
    ):
        found = run(*words)
        assert found.exit_code == 2 and sentence in found.stderr, found.stderr


def test_its_own_parquet_is_read_once_it_is_filled_in(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"question_id": str(i), "category": "coding", "turns": [f"Write number {i}.", "Again."]} for i in range(3)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    found = read_prompts(tmp_path / "test.parquet")
    assert [(one.text, one.group) for one in found] == [(f"Write number {i}.", "coding") for i in range(3)]
    place = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
    parquet.write_table(arrow.Table.from_pylist([rows[0] | {"turns": [place]}]), tmp_path / "raw.parquet")
    with pytest.raises(UserError, match=r"prepare_data\.py fills in"):
        read_prompts(tmp_path / "raw.parquet")
    (tmp_path / "none.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts(tmp_path / "none.parquet")
