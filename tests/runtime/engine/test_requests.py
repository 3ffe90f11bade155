"""What requests may ask of an engine each for itself: drafters, γ, rules, salts; and texts that go on elsewhere."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import Model, Speculator, load
from runtime.engine.engine import Engine
from runtime.engine.metrics import Counts, Metrics, total
from runtime.engine.requests import RequestOptions, finish_reason, make_request, shown
from runtime.engine.schedule import PREFILL_ROWS, prompt_pieces
from runtime.errors import UserError
from runtime.sampling.detokenize import Detokenizer
from runtime.sampling.params import Sampling
from runtime.speculative.draft import NoDrafter, Request
from runtime.speculative.draft_length import Controller
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.suffix import SuffixDrafter
from runtime.speculative.drafters.tree import TreeDrafter

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=3),
    Sampling(presence_penalty=0.6, repetition_penalty=1.3),
    Sampling(temperature=0.8, top_p=0.9, frequency_penalty=0.4, seed=9, min_tokens=12),
]


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., Path]) -> tuple[Model, Model]:
    return load(tiny("llama")), load(tiny("llama", num_hidden_layers=1))


def prompts(count: int, length: int = 20) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [[*rng.integers(1, 40, length).tolist()] for _ in range(count)]


def drafters(draft: Any) -> dict[str, Any]:
    return {
        "lookup": LookupDrafter(),
        "model": ModelDrafter(draft),
        "suffix": SuffixDrafter(),
        "tree": TreeDrafter(draft),
    }


def run(engine: Engine, these: Sequence[Request]) -> list[Metrics]:
    metrics = [Metrics() for _ in these]
    for one, measured in zip(these, metrics, strict=True):
        engine.add(one, measured)
    while engine.busy:
        engine.step()
    assert all(one.error is None for one in these)
    return metrics


def alone(target: Any, one: Request) -> list[int]:
    [result] = Speculator(target).generate(
        [one.tokens[: one.prompt_length]], one.max_new_tokens, one.sampling, stop=tuple(one.stop_tokens)
    )
    return result.tokens


@pytest.mark.parametrize("gamma", [4, Controller()])
def test_each_request_has_its_drafter(pair: tuple[Model, Model], gamma: Any) -> None:
    target, draft = pair
    known = drafters(draft)
    engine = Engine(target.decoder, known, gamma, "coupled", target.decoder.new_cache())
    names, drafting = ["lookup", "model", "suffix", "tree", "none", None], set[str]()
    options = [RequestOptions(drafter=name, rounds=True) for name in names]
    these = [
        make_request(target, prompt, 40, SAMPLINGS[i % 4], (), options[i % 6], id=i)
        for i, prompt in enumerate(prompts(12))
    ]
    metrics = run(engine, these)
    assert [one.new_tokens for one in these] == [alone(target, one) for one in these]
    for one, measured in zip(these, metrics, strict=True):
        who = {event.drafter for event in one.found.rounds if event.tokens}
        assert who <= {names[one.id % 6] or "lookup"}
        drafting |= who
        assert measured.drafted == sum(len(event.tokens) for event in one.found.rounds)
    assert all(not drafter._texts for drafter in known.values())
    assert drafting == set(known) or gamma != 4


def test_an_unknown_drafter(fake: Callable[..., Any]) -> None:
    target = fake(0)
    engine = Engine(target.decoder, LookupDrafter(), 4, "coupled", target.decoder.new_cache())
    one = make_request(target, [1], 5, Sampling(), None, RequestOptions(drafter="oracle"), id=0)
    with pytest.raises(UserError, match="drafter must be one of lookup, none, grammar, but is oracle"):
        engine.add(one, Metrics())
    assert not engine.busy


@pytest.mark.parametrize("gamma", [6, Controller()])
def test_the_bound_on_a_draft_is_the_requests_own(pair: tuple[Model, Model], gamma: Any) -> None:
    target, draft = pair
    engine = Engine(target.decoder, ModelDrafter(draft), gamma, "coupled", target.decoder.new_cache())
    bounds = [0, 1, 3, None]
    these = [
        make_request(target, prompt, 40, Sampling(), (), RequestOptions(draft_length=bound), id=i)
        for i, (prompt, bound) in enumerate(zip(prompts(4), bounds, strict=True))
    ]
    metrics = run(engine, these)
    longest = [len(m.draft_lengths) - 1 for m in metrics]
    assert all(length <= bound for length, bound in zip(longest, [0, 1, 3, 16], strict=True))
    assert gamma != 6 or longest == [0, 1, 3, 6]
    assert [one.new_tokens for one in these] == [alone(target, one) for one in these]


def test_the_rule_is_the_requests_own(
    constant: Callable[..., Any], chi_squared: Callable[[np.ndarray, np.ndarray], float]
) -> None:
    p = np.array([0.5, 0.3, 0.2])
    target, draft = constant(p), constant(p[::-1].copy())
    options = [RequestOptions(verify="coupled"), RequestOptions(verify="rejection"), RequestOptions()]
    engine = Engine(target.decoder, ModelDrafter(draft), 3, "coupled", target.decoder.new_cache())
    these = [
        make_request(target, [7], 12, Sampling(temperature=1.0, seed=i // 3), (), options[i % 3], id=i)
        for i in range(180)
    ]
    run(engine, these)
    # The rule of the engine, and the same asked for; rejection writes another text of the same distribution.
    assert [one.tokens for one in these[::3]] == [one.tokens for one in these[2::3]]
    assert [one.tokens for one in these[::3]] != [one.tokens for one in these[1::3]]
    counts = np.zeros(3)
    for one in these[1::3]:
        counts += np.bincount(one.new_tokens, minlength=3)
    assert chi_squared(counts, p) > 1e-3


@pytest.mark.parametrize("drafter", [NoDrafter(), LookupDrafter()])
def test_a_text_goes_on_elsewhere_byte_for_byte(pair: tuple[Model, Model], drafter: Any) -> None:
    """From each of its tokens on: with penalties, minimum lengths, stop strings that span the border, and seeds."""
    target, _ = pair
    for i, prompt in enumerate(prompts(4)):
        [first] = Speculator(target).generate([prompt], 40, SAMPLINGS[i], stop=())
        stop = first.text[len(first.text) // 2 :][:4]
        [expected] = Speculator(target).generate([prompt], 40, SAMPLINGS[i], stop=stop)
        assert expected.finish == "stop"
        for cut in range(0, len(expected.tokens) + 1, 3):
            engine = Engine(target.decoder, drafter, 4, "coupled", target.decoder.new_cache())
            resumed = make_request(target, prompt, 40, SAMPLINGS[i], stop, id=0, resumed=expected.tokens[:cut])
            measured = run(engine, [resumed])[0]
            assert resumed.new_tokens == expected.tokens and finish_reason(resumed) == "stop"
            assert measured.new_tokens == len(expected.tokens) - cut
            assert shown(resumed, Detokenizer(target.tokenizer, prompt), []) == expected.text


def test_a_text_that_has_ended_is_not_taken_on(pair: tuple[Model, Model]) -> None:
    target, _ = pair
    engine = Engine(target.decoder, LookupDrafter(), 4, "coupled", target.decoder.new_cache())
    for resumed, reason in [([5, 6, 7], "length"), ([5, 9], "stop")]:
        one = make_request(target, [1, 2], 3, Sampling(), (9,), id=0, resumed=resumed)
        engine.add(one, Metrics())
        assert one.finished and finish_reason(one) == reason and not engine.busy and one.new_tokens == resumed
    with pytest.raises(UserError, match="token 320"):
        make_request(target, [1, 2], 3, Sampling(), (9,), id=0, resumed=[320])


def test_rounds_tell_the_whole_text(pair: tuple[Model, Model]) -> None:
    target, draft = pair
    for drafter in (ModelDrafter(draft), TreeDrafter(draft), LookupDrafter()):
        engine = Engine(target.decoder, drafter, 4, "coupled", target.decoder.new_cache())
        one = make_request(target, prompts(1)[0], 40, Sampling(), (), RequestOptions(rounds=True), id=0)
        silent = make_request(target, prompts(1)[0], 40, Sampling(), (), id=1)
        measured, _ = run(engine, [one, silent])
        assert [token for event in one.found.rounds for token in event.gained] == one.new_tokens
        for event in one.found.rounds:
            parents = [-1, *event.path]
            assert [event.parents[i] for i in event.path] == parents[: len(event.path)]
            accepted = [event.tokens[i] for i in event.path]
            assert event.gained[: len(accepted)] == accepted and len(event.gained) == len(accepted) + 1
            assert event.milliseconds >= event.draft_milliseconds >= 0
        assert sum(len(event.path) for event in one.found.rounds) == measured.accepted
        assert silent.found.rounds == []


def test_half_the_rows_are_the_oldests_and_the_rest_the_shortests() -> None:
    def pieces(left: list[int], rows: int) -> list[int]:
        reading: Any = [(type("S", (), {"number": i}), count) for i, count in enumerate(left)]
        return list(prompt_pieces(reading, rows).values())

    assert pieces([1000], 100) == [100] and pieces([30], 100) == [30]
    assert pieces([1000, 20, 300], 100) == [50, 20, 30]
    assert pieces([1000, 20, 300, 10], 100) == [50, 20, 20, 10]
    assert pieces([100, 100], 100) == [100, 0]  # of equals the older
    assert pieces([20, 300, 1000], 100) == [20, 80, 0]
    rng = np.random.default_rng(0)
    for _ in range(200):
        left, rows = rng.integers(1, 400, rng.integers(1, 9)).tolist(), int(rng.integers(1, 300))
        found = pieces(left, rows)
        assert sum(found) == min(rows, sum(left)) and all(0 <= a <= b for a, b in zip(found, left, strict=True))
        assert found[0] >= min(left[0], rows - rows // 2)


def test_a_long_prompt_does_not_starve_short_ones(fake: Callable[..., Any]) -> None:
    target = fake(0)
    engine = Engine(target.decoder, LookupDrafter(), 0, "coupled", target.decoder.new_cache())
    long = Request(0, [7] * (PREFILL_ROWS * 4), PREFILL_ROWS * 4, Sampling(), 4)
    short = [Request(i, [i] * 30, 30, Sampling(), 4) for i in range(1, 4)]
    for one in (long, *short):
        engine.add(one, Metrics())
    engine.step()
    assert [len(one.new_tokens) for one in (long, *short)] == [0, 1, 1, 1]
    rounds = 0
    while not long.new_tokens:  # and they do not starve it
        engine.add(Request(10 + rounds, [9] * 400, 400, Sampling(), 1), Metrics())
        engine.step()
        rounds += 1
    assert rounds <= 4 * PREFILL_ROWS // 64


def test_salts_part_prefixes(pair: tuple[Model, Model]) -> None:
    target, _ = pair
    cache = target.decoder.new_cache("float32", 60)
    engine = Engine(target.decoder, LookupDrafter(), 2, "coupled", cache)
    prompt, texts = prompts(1, 150)[0], set[tuple[int, ...]]()

    def reused(salt: str) -> int:
        one = make_request(target, prompt, 5, Sampling(), (), RequestOptions(cache_salt=salt), id=0)
        measured = run(engine, [one])[0]
        texts.add(tuple(one.tokens))
        return measured.reused_tokens

    assert [reused(salt) for salt in ("", "a", "b", "a", "", "b", "c")] == [0, 0, 0, 128, 128, 128, 0]
    assert len(texts) == 1


def test_counts_and_queue_time(pair: tuple[Model, Model], fake: Callable[..., Any]) -> None:
    target, _ = pair
    engine = Engine(target.decoder, LookupDrafter(), 0, "coupled", target.decoder.new_cache("float32", 9), max_batch=2)
    assert engine.counts() == Counts(0, 0, 0, 9)
    metrics = [Metrics() for _ in range(4)]
    for i, measured in enumerate(metrics):
        engine.add(make_request(target, prompts(4)[i], 10, Sampling(), (), id=i), measured)
    assert engine.counts() == Counts(0, 4, 0, 9)
    engine.step()
    assert engine.counts() == Counts(2, 2, 2, 7)
    while engine.busy:
        engine.step()
    assert engine.counts() == Counts(0, 0, 0, 9)
    queued = [measured.queue_seconds for measured in metrics]
    assert 0 <= queued[0] < queued[2] < metrics[2].arrivals[0][0]
    assert total(metrics).queue_seconds == pytest.approx(sum(queued))
    other = fake(0)
    plain = Engine(other.decoder, LookupDrafter(), 0, "coupled", load(target.path).decoder.new_cache())
    assert plain.counts() == Counts(0, 0, 0, 0)


def test_metrics_with_faults_add_up() -> None:
    parts = [Metrics(), Metrics()]
    parts[0].drafter_faults["a"] += 1
    parts[1].drafter_faults.update({"a": 2, "b": 1})
    assert total(parts).drafter_faults == {"a": 3, "b": 1}


def test_options_out_of_range() -> None:
    for options, message in [
        ({"logprobs": -1}, "logprobs must be 0"),
        ({"draft_length": 65}, "draft_length must be from 0 to 64"),
        ({"verify": "hopeful"}, "verify must be one of coupled, rejection, typical"),
    ]:
        with pytest.raises(UserError, match=message):
            RequestOptions(**options)  # type: ignore[arg-type]
    assert dataclasses.replace(RequestOptions(), logprobs=0).wanted.logprobs == 0


def test_a_speculators_requests_have_options(fake: Callable[..., Any]) -> None:
    """A Speculator hands on what a request asks for."""
    target = fake(0)
    speculator = Speculator(target, LookupDrafter(), draft_length=4)
    [plain] = speculator.generate([[5, 6] * 9], 20, stop=(), drafter="none")
    [bounded] = speculator.generate([[5, 6] * 9], 20, stop=(), draft_length=1)
    assert plain.tokens == bounded.tokens and plain.metrics.drafted == 0
    assert len(bounded.metrics.draft_lengths) == 2
