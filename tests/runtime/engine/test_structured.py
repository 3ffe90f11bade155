"""Structured output in the engine: exact distributions, the same text with and without speculation, valid JSON."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from runtime import Model, Speculator, load
from runtime.engine.engine import Engine
from runtime.engine.metrics import Metrics
from runtime.engine.requests import RequestOptions, finish_reason, make_request
from runtime.errors import UserError
from runtime.sampling.grammar import Grammar, GrammarCompiler
from runtime.sampling.params import Sampling
from runtime.sampling.structure import Structure
from runtime.speculate import CacheOptions
from runtime.speculative.draft import Draft, NoDrafter, Request, Rule
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.tree import TreeDrafter
from runtime.speculative.drafters.tree_growth import TreeShape
from tests.conftest import byte_tokenizer

Fake = Callable[..., Any]
TOKENIZER = byte_tokenizer()
END = 0


def encoded(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def compile_() -> Callable[[Structure], Grammar]:
    return GrammarCompiler(TOKENIZER, 320, {END}).compile


def run(engine: Engine, these: Sequence[Request]) -> list[Metrics]:
    metrics = [Metrics() for _ in these]
    for one, measured in zip(these, metrics, strict=True):
        engine.add(one, measured)
    while engine.busy:
        engine.step()
    return metrics


# A model of one distribution over a few letters, and a small language: every text's probability is known.

PATTERN = Structure.regex("a(b|c)?d|bb(c| B)?|cc*d?")
LETTERS = [*encoded("abcd B"), END]
CHANCES = np.array([0.18, 0.22, 0.2, 0.12, 0.04, 0.04, 0.2])


def distribution(weights: np.ndarray) -> np.ndarray:
    p = np.zeros(320)
    p[[*encoded("abcd"), *encoded(" "), *encoded("B"), END][: len(weights)]] = weights
    p[encoded(" B")[0]] += 0.03
    return p / p.sum()


def enumerated(grammar: Grammar, p: np.ndarray, longest: int) -> dict[tuple[int, ...], float]:
    """The probability of each text: at each place the model's, among the tokens that may follow."""
    out: dict[tuple[int, ...], float] = {}
    open_texts: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_texts:
        text, weight = open_texts.pop()
        if len(text) == longest or (text and text[-1] == END):
            out[text] = weight
            continue
        matcher = grammar.matcher()
        matcher.advance(list(text))
        allowed = np.where(matcher.mask([]), p, 0.0)
        for token in np.flatnonzero(allowed):
            open_texts.append(((*text, int(token)), weight * allowed[token] / allowed.sum()))
    return out


def drafters(draft: Any, rule: Rule) -> dict[str, Any]:
    return {
        "none": NoDrafter(),
        "model": ModelDrafter(draft, rule),
        "tree": TreeDrafter(draft, TreeShape((2, 2, 1)), rule),
        "lookup": LookupDrafter(),
        "grammar": NoDrafter(),
    }


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("name", ["none", "model", "tree", "lookup", "grammar"])
def test_texts_have_the_masked_models_distribution(
    constant: Fake,
    compile_: Callable[[Structure], Grammar],
    rule: Rule,
    name: str,
    chi_squared: Callable[[np.ndarray, np.ndarray], float],
) -> None:
    p, q = distribution(CHANCES), distribution(CHANCES[::-1])
    target, draft = constant(p), constant(q)
    target.end_tokens = frozenset([END])
    grammar = compile_(PATTERN)
    expected = enumerated(grammar, p, 5)
    assert sum(expected.values()) == pytest.approx(1) and len(expected) > 12
    engine = Engine(target.decoder, drafters(draft, rule), 3, rule, target.decoder.new_cache(), max_batch=64)
    these = [
        make_request(
            target,
            encoded("abcd"),
            5,
            Sampling(temperature=1.0, seed=seed),
            None,
            RequestOptions(drafter=name),
            id=seed,
            grammar=grammar,
        )
        for seed in range(700)
    ]
    run(engine, these)
    assert all(one.error is None for one in these)
    places = {text: i for i, text in enumerate(expected)}
    counts = np.zeros(len(places))
    for one in these:
        counts[places[tuple(one.new_tokens)]] += 1
    assert chi_squared(counts, np.array(list(expected.values()))) > 1e-3
    # The draft's own distribution under the same grammar is another one.
    other = enumerated(grammar, q, 5)
    assert chi_squared(counts, np.array([other[text] for text in places])) < 1e-6


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.8, top_k=30, repetition_penalty=1.2, seed=4),
    Sampling(frequency_penalty=0.8),
    Sampling(temperature=1.2, top_p=0.9, seed=5, min_tokens=9),
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["small", "large"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
STRUCTURES = [
    Structure.json_schema(SCHEMA),
    Structure.json_schema(SCHEMA, "pretty"),
    Structure.regex("[a-c]{2,9}(-[0-9]{3})*"),
    Structure.choice(["yes, surely", "no", "no, never"]),
    Structure.lark('start: "(" start ")" | NAME\nNAME: /[a-d]{1,3}/'),
]


@pytest.mark.parametrize("name", ["model", "tree", "lookup", "grammar", "medley"])
def test_speculation_changes_no_text(fake: Fake, compile_: Callable[[Structure], Grammar], name: str) -> None:
    """And it is what a text by itself is, with a raw log-probability for each token."""
    target, draft = fake(0, end_tokens=(END,)), fake(0, noise=0.6)

    def asked(names: Sequence[str]) -> list[Request]:
        return [
            make_request(
                target,
                encoded("To be: ")[: 2 + i % 5],
                60,
                SAMPLINGS[i % 5],
                None,
                RequestOptions(drafter=names[i % len(names)], logprobs=1, rounds=True),
                id=i,
                grammar=compile_(STRUCTURES[i // 5]),
            )
            for i in range(25)
        ]

    plain, other = asked(["none"]), asked([name] if name != "medley" else ["model", "tree", "lookup", "grammar"])
    for one in plain:
        run(Engine(target.decoder, NoDrafter(), 0, "coupled", target.decoder.new_cache()), [one])
    known = drafters(draft, "coupled")
    metrics = run(Engine(target.decoder, known, 4, "coupled", target.decoder.new_cache()), other)
    assert [(one.tokens, one.found.logprobs, finish_reason(one)) for one in other] == [
        (one.tokens, one.found.logprobs, finish_reason(one)) for one in plain
    ]
    forced, accepted = sum(m.forced for m in metrics), sum(m.forced_accepted for m in metrics)
    assert accepted > 0.98 * forced > 100  # one text fails within a draft
    assert {event.drafter for one in other for event in one.found.rounds} >= {"grammar"}
    stopped = [one for one in plain if finish_reason(one) == "stop"]
    assert len(stopped) > 12 and all(one.tokens[-1] == END for one in stopped)
    assert all(not drafter._texts for drafter in known.values())


def test_a_text_goes_on_elsewhere_in_its_grammar(fake: Fake, compile_: Callable[[Structure], Grammar]) -> None:
    target, grammar = fake(0, end_tokens=(END,)), compile_(STRUCTURES[0])

    def ask(resumed: Sequence[int], sampling: Sampling) -> list[int]:
        one = make_request(target, [5, 6], 70, sampling, None, id=0, grammar=grammar, resumed=resumed)
        run(Engine(target.decoder, LookupDrafter(), 4, "coupled", target.decoder.new_cache()), [one])
        assert one.error is None
        return one.new_tokens

    for sampling in SAMPLINGS[:3]:
        whole = ask([], sampling)
        assert len(whole) > 20
        for cut in (1, 4, 9, len(whole) - 1, len(whole)):
            assert ask(whole[:cut], sampling) == whole


def test_a_request_whose_grammar_fails_ends_alone(fake: Fake, compile_: Callable[[Structure], Grammar]) -> None:
    """Only its end could follow, and it must not end yet."""
    target = fake(0, end_tokens=(END,))
    engine = Engine(target.decoder, LookupDrafter(), 4, "coupled", target.decoder.new_cache())
    bad = make_request(target, [5], 20, Sampling(min_tokens=12), None, id=0, grammar=compile_(Structure.choice(["ab"])))
    good = make_request(target, [5], 20, Sampling(), (), id=1)
    run(engine, [bad, good])
    assert "min_tokens is 12" in str(bad.error) and len(good.new_tokens) == 20 and good.error is None
    assert not target.decoder.caches[-1].slots


def test_no_token_below_the_mask_has_a_chance(constant: Fake, compile_: Callable[[Structure], Grammar]) -> None:
    target = constant(distribution(CHANCES))  # which never writes an x
    target.end_tokens = frozenset([END])
    one = make_request(target, [5], 20, Sampling(), None, id=0, grammar=compile_(Structure.choice(["x", "y"])))
    run(Engine(target.decoder, LookupDrafter(), 4, "coupled", target.decoder.new_cache()), [one])
    assert "no probability to any token that the grammar allows" in str(one.error)


def test_drawn_drafts_keep_their_first_wrong_token(compile_: Callable[[Structure], Grammar]) -> None:
    """`rejection` must judge it: to leave it out would be a choice that depends on what was drawn."""
    import torch

    from runtime.engine.drafting import pruned

    matcher = compile_(Structure.choice(["abc", "abd"])).matcher()
    a, b, x = *encoded("ab"), encoded("x")[0]
    probs = torch.zeros(3, 320)
    assert pruned(Draft.chain([a, x, b], probs), matcher).tokens == [a, x]
    assert pruned(Draft.chain([a, x, b]), matcher).tokens == [a]
    assert pruned(Draft.chain([a, b]), matcher) == Draft.chain([a, b])
    tree = Draft([a, x, b, x, b], [-1, -1, 0, 2, 1])
    assert pruned(tree, matcher) == Draft([a, b], [-1, 0])
    drawn = Draft([a, x], [-1, -1], torch.zeros(2, 320))
    assert pruned(drawn, matcher) is drawn


@pytest.fixture(scope="module")
def model(pair_target: Callable[[str], Path]) -> Model:
    return load(pair_target("original"))


def random_schema(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    leaves: list[Any] = [
        {"type": "string", "maxLength": 8},
        {"type": "string", "pattern": "^[a-z]{1,4}[0-9]?$"},
        {"type": "integer", "minimum": -5, "maximum": 500},
        {"type": "number", "minimum": 0, "exclusiveMaximum": 3},
        {"type": ["boolean", "null"]},
        {"enum": ["red", "green", 7, None]},
        {"const": {"version": 1}},
        {"anyOf": [{"type": "integer", "multipleOf": 5, "maximum": 50, "minimum": 0}, {"type": "null"}]},
        {"type": "string", "format": "date"},
        {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 3},
    ]
    names = ["id", "user name", "ok?", "größe", "list"][: rng.integers(1, 6)]
    inner = {name: leaves[rng.integers(len(leaves))] for name in names}
    below = {"k": leaves[rng.integers(len(leaves))]}
    return {
        "type": "object",
        "properties": {**inner, "sub": {"type": "object", "properties": below, "additionalProperties": False}},
        "required": [name for name in names if rng.integers(3)],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 300), marks=pytest.mark.slow)])
def test_random_schemas_on_the_pair(model: Model, seeds: range) -> None:
    """Greedy and sampled, with and without speculation, in one engine of few pages: what ends by itself validates."""
    on = Speculator(model, LookupDrafter(), draft_length=4, cache=CacheOptions(pages=24))
    off = Speculator(model)
    ended = 0
    for seed in seeds:
        schema = random_schema(seed)
        structure = Structure.json_schema(schema, "pretty" if seed % 3 == 0 else "compact")
        samplings = [Sampling(), Sampling(temperature=0.8, seed=seed), Sampling(temperature=1.1, top_p=0.95, seed=seed)]
        prompts = ["data = ", "import json\n\nprint(", "x"]
        plain = off.generate(prompts, 120, samplings, structure=structure)
        fast = on.generate(prompts, 120, samplings, structure=structure)
        assert [result.tokens for result in fast] == [result.tokens for result in plain]
        for result in plain:
            if result.finish == "stop":
                jsonschema.validate(json.loads(result.text), schema)
                ended += 1
        assert sum(r.metrics.rounds for r in fast) < sum(r.metrics.rounds for r in plain)
    assert ended > 2 * len(seeds)


def test_a_stream_shows_the_whole_object_and_no_end_token(model: Model) -> None:
    stream = Speculator(model, LookupDrafter()).stream("def f():", 80, structure=STRUCTURES[0], stop=())
    jsonschema.validate(json.loads("".join(piece.text for piece in stream)), SCHEMA)
    assert stream.finish == "stop" and stream.metrics.forced_accepted > 10
    with pytest.raises(UserError, match="the regex cannot be enforced"):
        Speculator(model).stream("x", 9, structure=Structure.regex("(?=a)"))
