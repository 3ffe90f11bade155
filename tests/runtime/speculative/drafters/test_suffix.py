"""The suffix automaton against a search of the whole text, and the drafter that reads it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.sampling.params import Sampling
from runtime.speculative.draft import Request
from runtime.speculative.drafters.suffix import ROOT, SuffixAutomaton, SuffixDrafter

Texts = list[list[int]]


def request(tokens: list[int], id_: int = 0) -> Request:
    return Request(id_, list(tokens), len(tokens), Sampling(), 5000)


def continuation(texts: Texts, stretch: list[int]) -> int | None:
    """What followed the stretch most often, the latest of equals."""
    counts: dict[int, tuple[int, int]] = {}
    time = 0
    for text in texts:
        for end in range(len(stretch), len(text)):
            time += 1
            if text[end - len(stretch) : end] == stretch:
                counts[text[end]] = (counts.get(text[end], (0, 0))[0] + 1, time)
    return max(counts, key=lambda token: counts[token]) if counts else None


def suffix(texts: Texts, stretch: list[int], most: int) -> list[int]:
    """The longest suffix of the stretch, of at most `most` tokens, that something followed."""
    for size in range(min(most, len(stretch)), 0, -1):
        if continuation(texts, stretch[-size:]) is not None:
            return stretch[-size:]
    return []


def searched(text: list[int], corpus: Texts, least: int, most: int, budget: int) -> list[int]:
    """The drafter's rule, by looking at every place."""
    source = [text]
    stretch = suffix(source, text, most)
    there = suffix(corpus, text, most)
    if len(there) > len(stretch):
        source, stretch = corpus, there
    out: list[int] = []
    while len(out) < budget and len(stretch) >= least:
        token = continuation(source, stretch)
        assert token is not None
        out.append(token)
        stretch = suffix(source, [*stretch, token], most)
    return out


tokens = st.lists(st.integers(0, 2), max_size=14)


@settings(max_examples=400)
@given(
    pieces=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=6),
    corpus=st.lists(tokens, max_size=3),
    least=st.integers(1, 3),
    more=st.integers(0, 5),
    budget=st.integers(0, 7),
)
def test_suffix_equals_a_search(pieces: Texts, corpus: Texts, least: int, more: int, budget: int) -> None:
    drafter = SuffixDrafter(corpus, least, least + more)
    growing = request(pieces[0])
    for piece in [[], *pieces[1:]]:
        growing.tokens += piece
        [draft] = drafter.propose([growing], [budget])
        assert draft.tokens == searched(growing.tokens, corpus, least, least + more, budget)
        assert draft.parents == list(range(-1, len(draft.tokens) - 1)) and draft.probs is None


@given(text=st.lists(st.integers(0, 2), max_size=40))
def test_the_automaton_holds_every_stretch_and_no_other(text: list[int]) -> None:
    automaton = SuffixAutomaton(4)
    for token in text:
        automaton.append(token)
    assert len(automaton.length) <= max(2 * len(text), 2)
    stretches = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    found = 0
    for stretch in stretches:
        state = ROOT
        for token in stretch:
            state = automaton.next[state][token]
        # A state's stretches have as many lengths as lie between its suffix link's and its own.
        assert automaton.length[automaton.link[state]] < len(stretch) <= automaton.length[state]
    found = sum(automaton.length[s] - automaton.length[automaton.link[s]] for s in range(1, len(automaton.length)))
    assert found == len(stretches)


def test_the_most_frequent_continuation_is_proposed_and_the_latest_of_equals() -> None:
    drafter = SuffixDrafter(min_match=2)
    text = [10, 1, 2, 7, 11, 1, 2, 7, 12, 1, 2, 8, 13, 1, 2]
    assert drafter.propose([request(text)], [1])[0].tokens == [7]
    assert SuffixDrafter(min_match=2).propose([request([10, 1, 2, 7, 11, 1, 2, 8, 12, 1, 2])], [1])[0].tokens == [8]
    assert SuffixDrafter(min_match=3).propose([request([5, 1, 2, 7, 6, 1, 2])], [1])[0].tokens == []


def test_the_text_wins_over_the_corpus_unless_that_reaches_further() -> None:
    corpus = [[4, 5, 6, 60, 61], [5, 6, 62], [5, 6, 62]]
    drafter = SuffixDrafter(corpus, min_match=2)
    assert drafter.propose([request([5, 6, 9, 5, 6], 0)], [2])[0].tokens == [9, 5]
    assert drafter.propose([request([5, 6, 9, 4, 5, 6], 1)], [3])[0].tokens == [60, 61]
    assert drafter.propose([request([3, 5, 6], 2)], [3])[0].tokens == [62]  # and not on into another text
    assert SuffixDrafter(min_match=2).propose([request([3, 5, 6], 2)], [3])[0].tokens == []


def test_only_new_tokens_are_read() -> None:
    class Counting(list[int]):
        read = 0

        def __getitem__(self, key: Any) -> Any:
            out = super().__getitem__(key)
            Counting.read += len(out) if isinstance(key, slice) else 1
            return out

    drafter, growing = SuffixDrafter(), request([])
    growing.tokens = Counting([i % 7 for i in range(1000)])
    drafter.propose([growing], [4])
    first, Counting.read = Counting.read, 0
    growing.tokens.append(0)
    drafter.propose([growing], [4])
    assert first >= 1000 and Counting.read == 1


def test_a_step_costs_the_same_in_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in tallies, in the worst text there is: every suffix has come before."""
    tallies = 0
    tally = SuffixAutomaton._tally

    def counting(self: SuffixAutomaton, state: int, token: int) -> None:
        nonlocal tallies
        tallies += 1
        tally(self, state, token)

    monkeypatch.setattr(SuffixAutomaton, "_tally", counting)
    automaton = SuffixAutomaton(16)
    for _ in range(5000):
        automaton.append(1)
    assert 4 * 5000 < tallies <= 16 * 5000


def test_texts_are_kept_apart_and_forgotten() -> None:
    drafter = SuffixDrafter(min_match=1)
    one, two = request([1, 2, 1], 1), request([1, 3, 1], 2)
    assert [d.tokens for d in drafter.propose([one, two], [1, 1])] == [[2], [3]]
    drafter.close(one)
    drafter.close(one)
    again = request([7, 8, 7], 1)
    assert [d.tokens for d in drafter.propose([again, two], [1, 2])] == [[8], [3, 1]]
    for least, most in ((0, 4), (5, 4)):
        with pytest.raises(ValueError, match="min_match"):
            SuffixDrafter(min_match=least, max_match=most)
    with pytest.raises(ValueError, match="max_match"):
        SuffixAutomaton(0)
