"""Stop strings against a search in the whole text, wherever rounds, tokens and characters are cut; and min_tokens."""

import codecs
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.engine.metrics import total
from runtime.errors import UserError
from runtime.sampling.detokenize import Detokenizer
from runtime.sampling.params import Sampling
from runtime.sampling.stopping import StopStrings, kept, resolve
from runtime.speculate import Result, Speculator
from runtime.speculative.drafters.lookup import LookupDrafter

Fake = Callable[..., Any]
# One, two, three and four bytes; the tokenizer has tokens of a space and one more byte, so a token may hold two
# characters, or one and a part of the next.
ALPHABET = "ab é你🙂"
TEXTS = st.text(ALPHABET, max_size=24)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3)
CUTS = st.lists(st.integers(1, 6), max_size=60)
# The tokenizer is the same for the whole session.
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PROMPTS = [[5, 6, 7], [9] * 40, [1, 2, 3, 1, 2, 3, 1, 2], [300, 4]]


def rounds(tokens: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """The tokens in pieces of the given sizes, and the rest."""
    edges = [0, *itertools.takewhile(lambda edge: edge < len(tokens), itertools.accumulate(cuts)), len(tokens)]
    return [list(tokens[a:b]) for a, b in itertools.pairwise(edges)]


def watched(
    tokenizer: Any, parts: Sequence[Sequence[int]], stops: Sequence[str], min_tokens: int = 0
) -> tuple[int | None, str]:
    """How many tokens are kept (None: no stop string), and the text, put together from what was released each round."""
    watch, text, seen = StopStrings(stops, Detokenizer(tokenizer, []), min_tokens), "", 0
    for part in parts:
        count = watch.add(part)
        text += watch.release()
        if count is not None:
            return seen + count, text + watch.release(last=True)
        seen += len(part)
    return None, text + watch.release(last=True)


def searched(
    tokenizer: Any, tokens: Sequence[int], stops: Sequence[str], min_tokens: int = 0
) -> tuple[int | None, str]:
    """The same by looking at all of the text after every token, with Python's own decoder."""
    pieces = tokenizer.convert_ids_to_tokens(list(tokens))
    decoder, text = codecs.getincrementaldecoder("utf-8")(), ""
    for count, piece in enumerate(pieces, 1):
        before = len(text)
        text += decoder.decode(bytes(bytearray(_byte(tokenizer, c) for c in piece)))
        ends = [
            (end, end - len(stop))
            for stop in stops
            for end in range(before + 1, len(text) + 1)
            if text[:end].endswith(stop) and count > min_tokens
        ]
        if ends:
            return count, text[: min(ends)[1]]
    return None, text


def _byte(tokenizer: Any, symbol: str) -> int:
    """Byte-level tokens write every byte as one printable symbol."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {shown: byte for byte, shown in bytes_to_unicode().items()}[symbol]


@QUICK
@given(TEXTS, STOPS, CUTS, st.integers(0, 6))
def test_a_stop_string_is_found_where_the_whole_text_has_it(
    tokenizer: Any, text: str, stops: list[str], cuts: list[int], min_tokens: int
) -> None:
    tokens = tokenizer(text)["input_ids"]
    expected = searched(tokenizer, tokens, stops, min_tokens)
    assert watched(tokenizer, rounds(tokens, cuts), stops, min_tokens) == expected
    assert watched(tokenizer, [tokens], stops, min_tokens) == expected


@QUICK
@given(st.lists(st.integers(1, 319), max_size=40), st.lists(st.text("ab�", min_size=1, max_size=2), min_size=1), CUTS)
def test_broken_characters_end_the_same_way_in_every_cut(
    tokenizer: Any, tokens: list[int], stops: list[str], cuts: list[int]
) -> None:
    assert watched(tokenizer, rounds(tokens, cuts), stops) == watched(tokenizer, [tokens], stops)


@QUICK
@given(TEXTS, STOPS, CUTS)
def test_only_what_may_become_a_stop_string_is_held_back(
    tokenizer: Any, text: str, stops: list[str], cuts: list[int]
) -> None:
    tokens = tokenizer(text)["input_ids"]
    watch, all_of_it = StopStrings(stops, Detokenizer(tokenizer, [])), Detokenizer(tokenizer, [])
    shown = whole = ""
    for part in rounds(tokens, cuts):
        if watch.add(part) is not None:
            break
        whole += "".join(all_of_it.add([token]) for token in part)
        shown += watch.release()
        held = whole.removeprefix(shown)
        assert shown + held == whole
        assert held == "" or any(len(held) < len(stop) and stop.startswith(held) for stop in stops)


def test_text_is_held_back_and_comes_when_it_was_no_stop_string(tokenizer: Any) -> None:
    watch = StopStrings(["ab\n", "bcd"], Detokenizer(tokenizer, []))
    shown = []
    for character in "xabcabc🙂ab":
        assert watch.add(tokenizer(character)["input_ids"]) is None
        shown.append(watch.release())
    # "ab" goes when "bc" cannot follow it any more, "bc" when it is not followed by "d".
    assert shown == ["x", "", "", "a", "bc", "", "a", "bc🙂", "", ""]
    assert watch.release(last=True) == "ab"


def test_an_emoji_over_byte_tokens_stops_with_its_last_byte(tokenizer: Any) -> None:
    emoji, cjk = tokenizer("🙂")["input_ids"], tokenizer("你好")["input_ids"]
    assert len(emoji) == 4 and len(cjk) == 6
    tokens = [*cjk, *emoji, *cjk]
    assert watched(tokenizer, [[token] for token in tokens], ["🙂"]) == (10, "你好")
    assert watched(tokenizer, [tokens], ["好🙂你"]) == (13, "你")
    # 🙃 shares three bytes with 🙂: nothing but the last byte tells them apart.
    assert watched(tokenizer, [tokens], ["🙃"]) == (None, "你好🙂你好")
    assert watched(tokenizer, [emoji[:3]], ["🙂"]) == (None, "�")
    assert watched(tokenizer, [emoji[:3]], ["�"]) == (None, "�")


def test_the_first_to_be_complete_wins_then_the_longest(tokenizer: Any) -> None:
    tokens = tokenizer("xabcd")["input_ids"]
    assert watched(tokenizer, [tokens], ["abcd", "bc"]) == (4, "xa")
    assert watched(tokenizer, [tokens], ["c", "abc", "bc"]) == (4, "x")
    # " é" is a token of the space and é's first byte: two characters end with one token, and the first of them stops.
    two = tokenizer("x a b")["input_ids"]
    assert watched(tokenizer, [two], ["a", " "]) == (2, "x")


def test_nothing_follows_a_stop_string(tokenizer: Any) -> None:
    watch = StopStrings(["a"], Detokenizer(tokenizer, []))
    assert watch.add(tokenizer("xa")["input_ids"]) == 2 and watch.found
    with pytest.raises(ValueError, match="no token can follow"):
        watch.add([5])
    for wrong in ([], ["a", ""]):
        with pytest.raises(ValueError, match="must not be empty"):
            StopStrings(wrong, Detokenizer(tokenizer, []))


def test_stop_tokens_and_strings_together(tokenizer: Any) -> None:
    tokens = tokenizer("abcd")["input_ids"]

    def ends(stop: Sequence[int], *strings: str) -> tuple[int, bool]:
        return kept(tokens, stop, StopStrings(strings, Detokenizer(tokenizer, [])) if strings else None)

    assert ends([]) == (4, False) and ends([], "x") == (4, False)
    assert ends([tokens[2]]) == (3, True) == ends([tokens[2]], "x") == ends([tokens[2]], "cd")
    assert ends([tokens[2]], "ab") == (2, True) == ends([], "ab")


def test_what_a_user_s_stop_means(fake: Fake) -> None:
    model = fake(0, end_tokens=[11, 12])
    own = frozenset([11, 12])
    assert resolve(None, model, 320) == (own, ())
    assert resolve((), model, 320) == (frozenset(), ())
    assert resolve([7], model, 320) == (frozenset([7]), ())
    assert resolve("\n\n", model, 320) == (own, ("\n\n",)) == resolve(["\n\n", "\n\n"], model, 320)
    assert resolve([7, "b", "a"], model, 320) == (frozenset([7]), ("b", "a"))
    # A special token has no text, so its name can only mean the token.
    assert resolve(["<end>"], model, 320) == (own | {0}, ())
    assert resolve(None, fake(0, end_tokens=[]), 320) == (frozenset([0]), ())
    mistakes: list[tuple[Any, str]] = [
        ("", "at least one character"),
        (["a", ""], "at least one character"),
        ([320], "stop holds token 320, but the target's vocabulary has the ids 0 to 319"),
        ([-1], "stop holds token -1"),
        ([1.5], "stop must hold texts and token ids, but holds 1.5"),
    ]
    for stop, message in mistakes:
        with pytest.raises(UserError, match=message):
            Speculator(model).stream([1, 2], stop=stop)


# With the loop.


@pytest.fixture
def writer(fake: Fake) -> Callable[..., Any]:
    """writer(seed, noise) writes random letters, spaces and pieces of emoji rather than random bytes."""

    def make(seed: int = 0, noise: float = 0.0) -> Any:
        model = fake(seed, noise)
        allowed = np.zeros(320)
        for character in "abcdef é🙂":
            allowed[model.tokenizer(character)["input_ids"]] = 30
        law = model.decoder.law
        model.decoder.law = lambda context: law(context) + allowed
        return model

    return make


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.1}])
def test_stop_strings_do_not_depend_on_speculation(writer: Callable[..., Any], options: dict[str, Any]) -> None:
    """At every text of one to three characters that the plain text could stop at, alone, in a batch and as a stream."""
    target, draft = writer(), writer(noise=0.5)
    [plain] = Speculator(target).generate([PROMPTS[0]], 50, **options)
    parts = {plain.text[i : i + n] for i in range(len(plain.text)) for n in (1, 2, 3)}
    stops = sorted(part for part in parts if "�" not in part)[::3]
    assert len(stops) > 5
    accepted = 0
    for stop in stops:
        expected = expected_end(target.tokenizer, plain, stop)
        for drafter, gamma in ((None, 0), (draft, 3), (draft, 12), (LookupDrafter(), 5)):
            speculator = Speculator(target, drafter, gamma)
            results = speculator.generate([PROMPTS[0], PROMPTS[3]], 50, stop=[stop], **options)
            assert (results[0].tokens, results[0].text, results[0].finish) == (*expected, "stop")
            assert results[0].metrics.new_tokens == len(expected[0])
            accepted += total([result.metrics for result in results]).accepted
            stream = speculator.stream(PROMPTS[0], 50, stop=stop, **options)
            pieces = list(stream)
            assert "".join(piece.text for piece in pieces) == expected[1] and stream.finish == "stop"
            assert [token for piece in pieces for token in piece.tokens] == expected[0]
    assert accepted > 100
    assert all(not cache.slots for cache in target.decoder.caches)
    [other] = Speculator(target, draft).generate([PROMPTS[0]], 50, stop=["never"], **options)
    assert (other.tokens, other.text, other.finish) == (plain.tokens, plain.text, "length")


def expected_end(tokenizer: Any, plain: Result, stop: str) -> tuple[list[int], str]:
    """The tokens through the one whose text completes the stop string, and the text before it."""
    detokenizer, text = Detokenizer(tokenizer, plain.prompt_tokens), ""
    for count, token in enumerate(plain.tokens, 1):
        text += detokenizer.add([token])
        if stop in text:
            return plain.tokens[:count], text[: text.index(stop)]
    raise AssertionError(f"{stop!r} is not in the text")


def test_a_stop_token_s_text_is_not_shown(writer: Callable[..., Any]) -> None:
    """An ordinary token as a stop token has a text, which a special one has not."""
    target = writer()
    [plain] = Speculator(target).generate([PROMPTS[0]], 40)
    stop = next(token for token in plain.tokens[3:] if target.tokenizer.decode([token]) in "abcdef")
    until = plain.tokens[: plain.tokens.index(stop)]
    expected = Detokenizer(target.tokenizer, PROMPTS[0]).add(until, last=True)
    for strings in ([], ["never"]):
        [result] = Speculator(target, writer(noise=0.5)).generate([PROMPTS[0]], 40, stop=[stop, *strings])
        assert result.text == expected and result.tokens == [*until, stop] and result.finish == "stop"
        pieces = Speculator(target, writer(noise=0.5)).stream(PROMPTS[0], 40, stop=[stop, *strings])
        assert "".join(piece.text for piece in pieces) == expected


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 2}])
def test_min_tokens_keep_a_text_going(writer: Callable[..., Any], options: dict[str, Any]) -> None:
    target, draft = writer(), writer(noise=0.5)
    [plain] = Speculator(target).generate([PROMPTS[0]], 40, **options)
    stop = plain.tokens[4]
    assert plain.tokens.index(stop) <= 4
    for least in (5, 6, 20):
        results = []
        for drafter, gamma in ((None, 0), (draft, 3), (draft, 12)):
            speculator = Speculator(target, drafter, gamma)
            [result] = speculator.generate([PROMPTS[0]], 40, stop=[stop], min_tokens=least, **options)
            results.append((result.tokens, result.text, result.finish))
            assert stop not in result.tokens[:least] and len(result.tokens) > least
            assert gamma == 0 or result.metrics.accepted > 0
        assert results[0] == results[1] == results[2]
    # The text of a stop string may come before that; there it does not count.
    letter = target.tokenizer.decode([next(t for t in plain.tokens if target.tokenizer.decode([t]) in "abcdef")])
    for gamma in (0, 3, 12):
        speculator = Speculator(target, draft, gamma)
        [early] = speculator.generate([PROMPTS[0]], 40, stop=[letter], **options)
        [late] = speculator.generate([PROMPTS[0]], 40, stop=[letter], min_tokens=20, **options)
        assert len(early.tokens) <= 20 < len(late.tokens) and letter in late.text
        assert late.tokens == plain.tokens[: len(late.tokens)]
    with pytest.raises(UserError, match=r"min_tokens must be at most max_new_tokens \(40\), but is 41"):
        Speculator(target).generate([PROMPTS[0]], 40, min_tokens=41)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_bias_and_min_tokens_are_sampled_from_the_right_distribution(
    constant: Callable[[np.ndarray], Any], chi_squared: Callable[[np.ndarray, np.ndarray], float], rule: Any
) -> None:
    """Token 0 stops: never among the first three, then with the share that its bias gives it."""
    p = np.array([0.3, 0.3, 0.2, 0.15, 0.05])
    bias = {0: -0.7, 3: 1.2}
    biased = p * np.exp([bias.get(token, 0.0) for token in range(5)])
    early, late = biased * (np.arange(5) > 0), biased
    samplings = [Sampling(temperature=1.0, seed=seed, logit_bias=bias, min_tokens=3) for seed in range(600)]
    for draft in (constant(p), constant(p[::-1].copy()), LookupDrafter(), None):
        results = Speculator(constant(p), draft, draft_length=3, verify=rule).generate(
            [[7]] * len(samplings), 4, samplings, stop=[0]
        )
        tokens = np.array([result.tokens for result in results])
        assert tokens.shape == (600, 4)
        pairs = np.zeros((5, 5))
        np.add.at(pairs, (tokens[:, 2], tokens[:, 3]), 1)
        assert chi_squared(pairs, np.outer(early / early.sum(), late / late.sum())) > 1e-3
        # The harness sees that bias or mask is missing.
        assert chi_squared(pairs, np.outer(late / late.sum(), late / late.sum())) < 1e-9
        assert chi_squared(pairs, np.outer(early / early.sum(), p)) < 1e-9


def test_a_bias_outside_the_vocabulary(fake: Fake) -> None:
    Speculator(fake(0)).stream([1], logit_bias={319: 1.0}).close()
    with pytest.raises(UserError, match="logit_bias names token 320, but the target's vocabulary has the ids 0 to 319"):
        Speculator(fake(0)).stream([1], logit_bias={320: 1.0})
