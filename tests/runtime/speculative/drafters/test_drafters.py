"""Lookup against a search of the whole text, and the draft model's cache against one that starts anew each time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.sampling.params import Sampling
from runtime.speculative.draft import Draft, Request
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.model import PREFILL_ROWS, ModelDrafter
from tests.probabilities import probabilities

Fake = Callable[..., Any]


def request(tokens: list[int], id_: int = 0, sampling: Sampling | None = None, limit: int = 5000) -> Request:
    return Request(id_, list(tokens), len(tokens), sampling if sampling is not None else Sampling(), limit)


def searched(tokens: list[int], max_ngram: int, budget: int) -> list[int]:
    """The same rule, by looking at every place of the text."""
    for n in range(min(max_ngram, len(tokens) - 1), 0, -1):
        suffix = tokens[-n:]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == suffix:
                text = list(tokens)
                for i in range(budget):
                    text.append(text[start + n + i])
                return text[len(tokens) :]
    return []


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8),
    max_ngram=st.integers(1, 5),
    budget=st.integers(0, 7),
)
def test_lookup_equals_a_search(pieces: list[list[int]], max_ngram: int, budget: int) -> None:
    drafter = LookupDrafter(max_ngram)
    growing = request(pieces[0])
    for piece in [[], *pieces[1:]]:
        growing.tokens += piece
        [draft] = drafter.propose([growing], [budget])
        assert draft.tokens == searched(growing.tokens, max_ngram, budget)
        assert draft.parents == list(range(-1, len(draft.tokens) - 1)) and draft.probs is None


def test_lookup_prefers_the_longest_and_then_the_latest() -> None:
    drafter = LookupDrafter(3)
    #        the pair (1, 2) comes twice, the single 2 once more after them
    tokens = [1, 2, 10, 11, 1, 2, 20, 21, 2, 30, 31, 1, 2]
    assert drafter.propose([request(tokens)], [2])[0].tokens == [20, 21]
    assert LookupDrafter(1).propose([request(tokens)], [2])[0].tokens == [30, 31]


def test_lookup_reads_only_new_tokens() -> None:
    class Counting(list[int]):
        read = 0

        def __getitem__(self, key: Any) -> Any:
            Counting.read += 1
            return super().__getitem__(key)

    drafter, growing = LookupDrafter(3), request([])
    growing.tokens = Counting(range(1000))
    drafter.propose([growing], [4])
    first, Counting.read = Counting.read, 0
    growing.tokens.append(0)
    drafter.propose([growing], [4])
    assert first > 1000 and Counting.read < 20


def test_lookup_keeps_texts_apart_and_forgets_them() -> None:
    drafter = LookupDrafter(2)
    one, two = request([1, 2, 1], 1), request([1, 3, 1], 2)
    assert [d.tokens for d in drafter.propose([one, two], [1, 1])] == [[2], [3]]
    drafter.close(one)
    again = request([7, 8, 7], 1)
    assert [d.tokens for d in drafter.propose([again, two], [1, 2])] == [[8], [3, 1]]
    with pytest.raises(ValueError, match="max_ngram"):
        LookupDrafter(0)


def anew(model: Any, one: Request, budget: int, rule: str = "coupled", **options: Any) -> Draft:
    fresh = request(one.tokens, sampling=one.sampling)
    fresh.prompt_length = one.prompt_length
    return ModelDrafter(model, rule, **options).propose([fresh], [budget])[0]  # type: ignore[arg-type]


SAMPLINGS = [Sampling(), Sampling(repetition_penalty=1.8), Sampling(temperature=0.9, top_k=20, seed=3)]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_model_keeps_its_cache_in_step(fake: Fake, sampling: Sampling, rule: str) -> None:
    """After any acceptance, none and full included, the draft is the one of a cache that has seen only the text."""
    model = fake(1)
    drafter = ModelDrafter(model, rule)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(4)
    texts = [request([5, 6, 7 + i], i, sampling) for i in range(3)]
    for _ in range(12):
        budgets = torch.randint(0, 6, (3,), generator=random).tolist()
        drafts = drafter.propose(texts, budgets)
        for text, draft, budget in zip(texts, drafts, budgets, strict=True):
            expected = anew(model, text, budget, rule)
            assert draft.tokens == expected.tokens and len(draft.tokens) == budget
            assert draft.parents == list(range(-1, budget - 1))
            assert (draft.probs is None) == (rule == "coupled" or sampling.greedy or budget == 0)
            if draft.probs is not None and expected.probs is not None:
                assert torch.equal(draft.probs, expected.probs) and draft.probs.dtype == torch.float64
            accepted = int(torch.randint(0, budget + 1, (1,), generator=random))
            text.tokens += [*draft.tokens[:accepted], int(torch.randint(0, 320, (1,), generator=random))]
    for text in texts:
        drafter.close(text)
        drafter.close(text)  # a request that never drafted, or was closed already, is no error
    assert model.decoder.caches[0].slots == {}


def test_a_stale_cache_would_be_noticed(fake: Fake) -> None:
    model = fake(1, broken=True)
    drafter, text = ModelDrafter(model), request([5, 6, 7])
    same = []
    for _ in range(4):
        [draft] = drafter.propose([text], [4])
        same.append(draft.tokens == anew(model, text, 4).tokens)
        text.tokens += [draft.tokens[0], 300]
    assert same[0] and not all(same[1:])


def test_model_feeds_missing_tokens_in_one_forward(fake: Fake) -> None:
    model = fake(1)
    drafter, text = ModelDrafter(model), request(list(range(10)))
    [draft] = drafter.propose([text], [4])
    assert model.decoder.widths == [10, 1, 1, 1]
    text.tokens += [*draft.tokens, 9]  # all accepted: the last drafted token has no key yet
    drafter.propose([text], [2])
    assert model.decoder.widths[4:] == [2, 1]
    other = request([3, 4], 1)
    drafter.propose([text, other], [3, 1])
    assert model.decoder.widths[6:] == [1 + 2, 1, 1]


def test_model_feeds_long_prompts_in_pieces(fake: Fake) -> None:
    model = fake(1)
    text = request([i % 300 for i in range(2 * PREFILL_ROWS + 10)])
    assert ModelDrafter(model).propose([text], [1])[0] == anew(fake(1), text, 1)
    assert model.decoder.widths == [PREFILL_ROWS, PREFILL_ROWS, 10]


def test_coupled_drafts_use_the_target_s_noise(fake: Fake) -> None:
    from runtime.sampling.noise import exponential, race

    model, sampling = fake(1), Sampling(temperature=1.0, seed=11)
    text = request([5, 6, 7], sampling=sampling)
    [draft] = ModelDrafter(model).propose([text], [3])
    path = list(text.tokens)
    for token in draft.tokens:
        row = probabilities(torch.tensor(model.decoder.law(tuple(path[-3:])), dtype=torch.float32), sampling)
        assert token == race(row.numpy(), exponential(11, len(path), 320))
        path.append(token)


def test_drafts_end_with_the_draft_s_positions(fake: Fake) -> None:
    model = fake(1, max_positions=12)
    drafter = ModelDrafter(model)
    lengths = []
    for count in (8, 9, 10, 11, 12, 13, 40):
        lengths.append(len(drafter.propose([request(list(range(1, count + 1)), count)], [4])[0].tokens))
    assert lengths == [4, 4, 3, 2, 1, 0, 0]


def test_vocabularies_of_different_padding(fake: Fake) -> None:
    """A draft with fewer logits than the target pads its distributions; one with more proposes nothing beyond."""
    sampling = Sampling(temperature=1.0, seed=1)
    wide = ModelDrafter(fake(1), "rejection", vocab_size=400)
    [draft] = wide.propose([request([1, 2], sampling=sampling)], [2])
    assert draft.probs is not None and draft.probs.shape == (2, 400) and draft.probs[:, 320:].sum() == 0
    [draft] = wide.propose([request([1, 350, 2], 1, sampling)], [2])  # a token that the draft has no embedding for
    assert draft.tokens == []
    narrow = ModelDrafter(fake(1), "rejection", vocab_size=5)
    [draft] = narrow.propose([request([1, 2], sampling=Sampling(temperature=9.0, seed=1))], [20])
    assert draft.probs is not None and draft.probs.shape == (20, 5) and len(set(draft.tokens)) > 2
    torch.testing.assert_close(draft.probs.sum(1), torch.ones(20).double())
