"""The pure parts of examples/compare/speculation.py, and what it says to a user's mistakes. No peer is needed."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner


def turns(compare: Any, seconds: list[float], text: tuple[int, ...]) -> list[Any]:
    """One prompt, rounds of so many seconds."""
    return [compare("rounds").Turn(s, 2 * s, (text,)) for s in seconds]


def way(compare: Any, engine: str, drafter: str, length: int | None = None) -> Any:
    return compare("ways").Way(engine, "", False, drafter, draft_length=length)


def test_tokens_and_texts_that_differ_are_counted_place_by_place(compare: Any) -> None:
    differing = compare("standings").differing
    assert differing([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]) == (0, 0)
    assert differing([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 0, 0]]) == (2, 1)
    # Equal again after a difference is equal; a missing token is an error of the worker, not a difference.
    assert differing([[1, 2, 3]], [[0, 2, 3]]) == (1, 1)
    with pytest.raises(ValueError, match="shorter"):
        differing([[1, 2, 3]], [[1, 2]])


def test_agreement_ends_at_the_first_difference(compare: Any) -> None:
    agreement = compare("standings").agreement
    assert agreement([[1, 2, 3, 4]], [[1, 2, 3, 4]]) == 1.0
    assert agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 0, 3, 4], [5, 6, 7, 8]]) == pytest.approx(0.625)
    assert agreement([[1, 2]], [[0, 2]]) == 0.0


def test_rows_are_medians_over_rounds_and_hold_each_engine_against_its_own_plain_text(compare: Any) -> None:
    decoded, work = compare("rounds").Decoded, compare("rounds").Work([[7]], 4, 3, 1)
    found = [
        decoded(way(compare, "transformers", "none"), {}, turns(compare, [1.0, 2.0, 4.0], (1, 2, 3, 4))),
        decoded(way(compare, "transformers", "lookup", 5), {}, turns(compare, [0.5, 0.5, 4.0], (1, 2, 3, 0))),
        decoded(way(compare, "openvino", "model", 5), {}, turns(compare, [1.0, 1.0, 1.0], (1, 9, 9, 9))),
    ]
    plain, lookup, alone = compare("standings").rows(found, work)
    assert (plain.tokens_per_second, plain.tokens_per_second_min, plain.tokens_per_second_max) == (2.0, 1.0, 4.0)
    assert (plain.over_plain, plain.tokens_differing, plain.cores, plain.agreement) == (1.0, 0, 2.0, 1.0)
    # Round by round 2, 4 and 1 times as fast: the median of the ratios, not the ratio of the medians (which is 4).
    assert lookup.over_plain == 2.0
    assert (lookup.tokens_compared, lookup.tokens_differing, lookup.texts_differing) == (12, 3, 3)
    assert lookup.agreement == 0.75
    # Its engine's plain decoding was not measured: nothing to hold it against, and no zeros for it either.
    assert (alone.over_plain, alone.tokens_compared, alone.tokens_differing) == (None, None, None)
    assert alone.agreement == 0.25


def test_ratios_take_each_side_at_its_best_draft_length(compare: Any) -> None:
    decoded, text = compare("rounds").Decoded, (1,)
    found = [
        decoded(way(compare, "specpress", "none"), {}, turns(compare, [3.0, 3.0], text)),
        decoded(way(compare, "specpress", "lookup", 2), {}, turns(compare, [2.0, 2.0], text)),
        decoded(way(compare, "specpress", "lookup", 5), {}, turns(compare, [1.0, 1.5], text)),
        decoded(way(compare, "openvino", "none"), {}, turns(compare, [4.0, 3.0], text)),
        decoded(way(compare, "openvino", "model", 2), {}, turns(compare, [9.0, 9.0], text)),
        decoded(way(compare, "openvino", "model", None), {}, turns(compare, [0.5, 0.5], text)),
    ]
    plain, model = compare("standings").ratios(found)
    assert (plain.engine, plain.drafter, plain.ours, plain.ours_draft_length) == ("openvino", "none", "lookup", 5)
    assert (plain.ratio, plain.ratio_min, plain.ratio_max) == (3.0, 2.0, 4.0)
    assert plain.same_drafter == pytest.approx((4 / 3 + 1) / 2)
    assert (model.drafter, model.draft_length, model.ratio_max, model.same_drafter) == ("model", None, 0.5, None)


def test_draft_lengths_multiply_the_ways_that_draft(compare: Any) -> None:
    ways = compare("ways")
    lengths = {w.name: [one.length for one in ways.with_lengths(w, [2, 5])] for w in ways.WAYS}
    assert lengths["specpress"] == ["-"]
    assert lengths["specpress, lookup"] == ["2", "5", "own"]
    assert lengths["openvino, lookup"] == ["2", "5"]
    assert lengths["transformers, model"] == ["2", "5", "own"]
    assert set(ways.PRECISIONS) == set(ways.ENGINES)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--engine", "vllm"], "--engine: expected one of transformers, openvino, llama.cpp, found 'vllm'"),
        (["--draft-lengths", "2,0"], "--draft-lengths: expected numbers from 1 to 64 with commas between them, found"),
        (["--draft-lengths", ""], "--draft-lengths: expected numbers from 1 to 64"),
        (["--peer-python", "nowhere/python"], "--peer-python: there is no nowhere/python; `make peers` builds"),
        (
            ["--engine", "transformers", "--json", "nowhere/x.json"],
            "--json: nowhere/x.json cannot be a file",
        ),
        (["--engine", "transformers", "--new-tokens", "1024"], "--new-tokens: expected fewer than the pair's 1024"),
        (["--engine", "transformers", "--source", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_a_mistake_ends_in_one_sentence(
    compare: Any, arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(compare("speculation").app, arguments)
    assert done.exit_code == 2
    assert sentence in done.output
    assert done.output.count("\n") == 1
    assert not any(tmp_path.iterdir())
