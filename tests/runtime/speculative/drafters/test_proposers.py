"""Every drafter gives a seed's text; drafters in a row; drafts with another tokenizer; typical acceptance."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.metrics import total
from runtime.sampling.noise import exponential, race
from runtime.sampling.params import Sampling
from runtime.speculate import Speculator
from runtime.speculative.draft import Draft, Outcome, Request
from runtime.speculative.drafters.fallback import ChainedDrafter, ChosenDrafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.other_tokenizer import ReencodedDrafter, model_drafter
from runtime.speculative.drafters.suffix import SuffixDrafter
from runtime.speculative.drafters.tree import TreeDrafter
from runtime.speculative.drafters.tree_growth import Growth, TreeShape
from runtime.speculative.verify import Acceptance, typical

Fake = Callable[..., Any]
PROMPTS = [[5, 6, 7], [9] * 10, [1, 2, 3, 1, 2, 3, 1, 2], [300, 4]]


def request(tokens: list[int], id_: int = 0) -> Request:
    return Request(id_, list(tokens), len(tokens), Sampling(), 5000)


def quick(model: Any) -> Any:
    """The same model, which remembers its logits."""
    model.decoder.law = functools.cache(model.decoder.law)
    return model


def drafter_of(name: str, good: Any, corpus: list[list[int]]) -> Any:
    return {
        "model": lambda: ModelDrafter(good),
        "lookup": LookupDrafter,
        "suffix": lambda: SuffixDrafter(corpus, min_match=1),
        "static": lambda: TreeDrafter(good, TreeShape((2, 2, 1, 1))),
        "dynamic": lambda: TreeDrafter(good, Growth(3, 2, 3)),
        "chained": lambda: ChainedDrafter([LookupDrafter(), TreeDrafter(good)]),
    }[name]()


@pytest.fixture(scope="module")
def plain_texts() -> dict[str, list[list[int]]]:
    return {}


@pytest.mark.parametrize("name", ["model", "lookup", "suffix", "static", "dynamic", "chained"])
def test_100_seeds_give_their_texts_whoever_drafts(fake: Fake, name: str, plain_texts: dict[str, Any]) -> None:
    """Alone and sixteen at a time."""
    target, good = quick(fake(0)), quick(fake(0, noise=1.0))
    samplings = [Sampling(temperature=0.7, top_p=0.95, seed=seed) for seed in range(100)]
    prompts = [PROMPTS[seed % 4] for seed in range(100)]
    if not plain_texts:
        results = Speculator(target).generate(prompts, 10, samplings)
        plain_texts["texts"] = [result.tokens for result in results]
    expected = plain_texts["texts"]
    assert len({tuple(tokens) for tokens in expected}) == 100
    speculator = Speculator(target, drafter_of(name, good, expected[::2]), draft_length=6)
    results = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        results += speculator.generate([prompt], 10, sampling)
    assert [result.tokens for result in results] == expected
    for first in range(0, 100, 16):
        part = slice(first, first + 16)
        together = speculator.generate(prompts[part], 10, samplings[part])
        assert [result.tokens for result in together] == expected[part]
    metrics = total([result.metrics for result in results])
    # Random texts do not repeat themselves: lookup drafts for the prompts' sake, and in vain.
    assert metrics.accepted > 100 or (name == "lookup" and metrics.drafted > 20)


# Drafters in a row.


class Fixed:
    """Proposes what it was given for a request, and remembers what it was asked and told."""

    def __init__(self, name: str, drafts: dict[int, Draft]) -> None:
        self.name, self.drafts = name, drafts
        self.asked: list[tuple[list[int], list[int]]] = []
        self.observed: list[Outcome] = []
        self.closed: list[int] = []

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        self.asked.append(([one.id for one in requests], list(budgets)))
        return [self.drafts.get(one.id, Draft()) for one in requests]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.observed += outcomes

    def close(self, one: Request) -> None:
        self.closed.append(one.id)


def test_the_next_drafter_is_asked_where_one_finds_nothing() -> None:
    first, second = Fixed("lookup", {1: Draft([7], [-1])}), Fixed("model", {0: Draft([8], [-1]), 1: Draft([9], [-1])})
    chained = ChainedDrafter([first, second])
    assert chained.name == "lookup+model"
    texts = [request([1], i) for i in range(4)]
    drafts = chained.propose(texts, [3, 4, 5, 0])
    assert [draft.tokens for draft in drafts] == [[8], [7], [], []]
    assert first.asked == [([0, 1, 2], [3, 4, 5])] and second.asked == [([0, 2], [3, 5])]
    outcome = Outcome(texts[0], [0], 1)
    chained.observe([outcome])
    chained.close(texts[1])
    assert first.observed == second.observed == [outcome] and first.closed == second.closed == [1]
    chained.propose([texts[1]], [2])
    assert len(second.asked) == 1
    with pytest.raises(ValueError, match="at least one"):
        ChainedDrafter([])


def test_a_drafter_that_chains_share_is_told_once() -> None:
    first, second = Fixed("lookup", {}), Fixed("model", {0: Draft([9], [-1])})
    chosen = ChosenDrafter([second, ChainedDrafter([first, second]), first])
    assert chosen.name == "model,lookup+model,lookup" and chosen.each == (second, first)
    outcome = Outcome(request([1]), [0], 1)
    chosen.observe([outcome])
    chosen.close(request([1], 5))
    assert first.observed == second.observed == [outcome] and first.closed == second.closed == [5]


# Another tokenizer.


def words(merges: Sequence[str]) -> Any:
    """A byte-level tokenizer of 320 entries in another order, with merges of letters up to the given words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    vocabulary = {"<fin>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}
    pairs: list[tuple[str, str]] = []
    for word in ("".join(piece for piece, _ in byte_level.pre_tokenize_str(word)) for word in merges):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                pairs.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = byte_level  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<fin>")


TEXT = "def né(x):\n  return x + 你好 🙂 and so on\n" * 3


class Reciting:
    """A decoder that continues TEXT in the tokens of its tokenizer, whatever those are, by the last three."""

    def __init__(self, fake: Fake, tokenizer: Any) -> None:
        tokens = list(tokenizer(TEXT)["input_ids"])
        follows = {tuple(tokens[max(0, i - 3) : i]): tokens[i] for i in range(1, len(tokens))}
        self.model = fake(0)
        self.model.tokenizer = tokenizer
        self.model.decoder.law = lambda context: np.eye(320)[follows.get(context, 1)] * 9
        self.tokens = tokens


def test_text_of_another_tokenizer_is_encoded_again(fake: Fake, tokenizer: Any) -> None:
    """A draft that knows the text: nearly all that it writes is accepted, characters of several bytes included."""
    target = Reciting(fake, tokenizer)
    draft = Reciting(fake, words(["return", " return", "and", "def"]))
    assert len(draft.tokens) != len(target.tokens)
    prompt, length = target.tokens[:30], len(target.tokens) - 60
    expected = Speculator(target.model).generate([prompt], length, stop=())[0].tokens
    speculator = Speculator(target.model, draft.model, draft_length=6)
    assert isinstance(speculator.drafter, ReencodedDrafter)
    for _ in range(2):
        [result] = speculator.generate([prompt], length, stop=())
        assert result.tokens == expected == target.tokens[30 : 30 + length]
        assert result.metrics.acceptance_rate is not None and result.metrics.acceptance_rate > 0.85
        assert result.metrics.tokens_per_round is not None and result.metrics.tokens_per_round > 3
    # The draft's cache kept what did not change: a few rows a round.
    assert sum(draft.model.decoder.widths) < 2 * (3 * len(draft.tokens) + 100)
    assert draft.model.decoder.caches[-1].slots == {}


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_re_encoded_draft_changes_no_text(fake: Fake, rule: Any) -> None:
    """Random models: bytes in any order, which are seldom whole characters."""
    target, draft = fake(0), fake(5)
    draft.tokenizer = words(["ab"])
    speculator = Speculator(target, draft, 5, rule)
    options: list[dict[str, Any]] = [{}] if rule == "rejection" else [{}, {"temperature": 1.0, "seed": 3}]
    for more in options:
        expected = [Speculator(target).generate([p], 30, **more)[0].tokens for p in PROMPTS]
        assert [result.tokens for result in speculator.generate(PROMPTS, 30, **more)] == expected


def test_re_encoded_drafts_within_positions_and_budgets(fake: Fake, tokenizer: Any) -> None:
    draft = Reciting(fake, words(["return"]))
    drafter = ReencodedDrafter(draft.model, tokenizer)
    end = TEXT.index(" and")
    tokens = tokenizer(TEXT[:end])["input_ids"]
    for budget in (0, 1, 2, 5):
        [found] = drafter.propose([request(tokens)], [budget])
        assert len(found.tokens) <= budget and found.parents == list(range(-1, len(found.tokens) - 1))
        assert bool(found.tokens) == (budget > 0) and found.probs is None
        assert TEXT[end:].startswith(tokenizer.decode(found.tokens))
    drafter.close(request(tokens))
    drafter.close(request(tokens))
    assert draft.model.decoder.caches[-1].slots == {}
    draft.model.decoder.max_positions = 10
    short = ReencodedDrafter(draft.model, tokenizer)
    assert short.propose([request(tokens)], [3])[0].tokens == []
    assert isinstance(model_drafter(fake(0), fake(1)), ModelDrafter)


def test_an_unfinished_character_is_finished_by_the_draft(fake: Fake, tokenizer: Any) -> None:
    draft = Reciting(fake, words(["return"]))
    drafter = ReencodedDrafter(draft.model, tokenizer)
    end = TEXT.index("🙂")
    smile = tokenizer("🙂")["input_ids"]
    tokens = tokenizer(TEXT[:end])["input_ids"]
    for known in range(len(smile) + 1):
        text = request([*tokens, *smile[:known]], known)
        [found] = drafter.propose([text], [6])
        assert found.tokens[: len(smile) - known] == smile[known:][: len(found.tokens)] and found.tokens
    # Bytes that can be no character are no reason to stop.
    draft.model.decoder.law = lambda context: np.eye(320)[draft.model.tokenizer("a")["input_ids"][0]]
    [found] = drafter.propose([request([*tokens, *smile[:1] * 5], 9)], [3])
    assert tokenizer.decode(found.tokens) == "aaa"


# Typical acceptance.


def test_typical_takes_the_longest_typical_path() -> None:
    p = torch.full((6, 4), 0.25, dtype=torch.float64)
    p[0] = torch.tensor([0.55, 0.4, 0.05, 0.0])
    p[2] = torch.tensor([0.1, 0.2, 0.2, 0.5])
    #         0            1           2 below 0    3 below 1   4 below 3
    draft = Draft([0, 1, 2, 3, 0], [-1, -1, 0, 1, 3])
    verdict = typical(p, draft, 10, 7)
    assert verdict.path == [1, 3, 4]
    assert verdict.next_token == race(p[5].numpy(), exponential(7, 13, 4))
    # Token 2 at the root: 0.05 is below min(0.09, 0.3 exp(-H)).
    assert typical(p[:2], Draft([2], [-1]), 10, 7).path == []
    assert typical(p[:2], Draft([2], [-1]), 10, 7, epsilon=0.04).path == [0]
    # Equally long paths: the first one.
    assert typical(p, Draft([0, 1], [-1, -1]), 10, 7).path == [0]


@given(
    row=st.lists(st.floats(0, 1), min_size=2, max_size=9).filter(lambda row: sum(row) > 0.1), seed=st.integers(0, 99)
)
def test_typical_keeps_to_the_typical_set(row: list[float], seed: int) -> None:
    p = np.array(row) / sum(row)
    entropy = -sum(x * np.log(x) for x in p if x > 0)
    allowed = {i for i, x in enumerate(p) if x > min(0.09, 0.3 * np.exp(-entropy))} | {int(p.argmax())}
    rows = torch.from_numpy(np.array([p, p]))
    for token in range(len(p)):
        verdict = typical(rows, Draft([token], [-1]), 3, seed)
        assert verdict.path == ([0] if token in allowed else []) and verdict.next_token in allowed
    assert typical(rows[:1], Draft(), 3, seed) == Acceptance([], typical(rows[:1], Draft(), 3, seed).next_token)


def test_typical_accepts_more_and_is_not_the_target_s_text(fake: Fake) -> None:
    target, draft = fake(0), fake(0, noise=2.0)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 4}
    lossy = Speculator(target, draft, 5, "typical", lossy=True).generate(PROMPTS, 40, **options)
    exact = Speculator(target, draft, 5, "coupled").generate(PROMPTS, 40, **options)
    assert [one.tokens for one in lossy] != [one.tokens for one in exact]
    again = Speculator(target, draft, 5, "typical", lossy=True).generate(PROMPTS, 40, **options)
    assert [one.tokens for one in lossy] == [one.tokens for one in again]
    assert total([one.metrics for one in lossy]).accepted > total([one.metrics for one in exact]).accepted
    tree = TreeDrafter(draft, Growth(3, 2, 3), "typical")
    trees = Speculator(target, tree, 5, "typical", lossy=True).generate(PROMPTS, 40, **options)
    assert total([one.metrics for one in trees]).accepted > 20
    # Requests that do not sample are judged greedily.
    greedy = Speculator(target, draft, 5, "typical", lossy=True).generate(PROMPTS, 20)
    assert [one.tokens for one in greedy] == [one.tokens for one in Speculator(target).generate(PROMPTS, 20)]


def test_a_corpus_helps(fake: Fake) -> None:
    target = fake(0)
    [plain] = Speculator(target).generate([PROMPTS[0]], 60)
    corpus = [[*PROMPTS[0], *plain.tokens]]
    without, helped = (Speculator(target, SuffixDrafter(text), 8) for text in ([], corpus))
    assert without.generate([PROMPTS[0]], 60)[0].tokens == plain.tokens
    [result] = helped.generate([PROMPTS[0]], 60)
    assert result.tokens == plain.tokens and result.metrics.acceptance_rate == 1
