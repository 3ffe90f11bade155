"""The loop: speculative output equals plain output, with any drafter, draft length and batch."""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime import load
from runtime.engine.metrics import Metrics, total
from runtime.errors import UserError
from runtime.sampling.detokenize import Detokenizer, require_same_vocabulary
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions, Speculator, Stream, lossless_class
from runtime.speculative.draft import Draft, Outcome, Request
from runtime.speculative.drafters.lookup import LookupDrafter

Fake = Callable[..., Any]
PROMPTS = [[5, 6, 7], [9] * 40, [1, 2, 3, 1, 2, 3, 1, 2], [300, 4]]


class TreeDrafter:
    """A tree that holds the target's greedy path now and then: two branches, the right one under random siblings."""

    name = "tree"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seen: list[Outcome] = []
        self.closed: list[int] = []

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        drafts = []
        for request, budget in zip(requests, budgets, strict=True):
            if budget < 5:
                drafts.append(Draft())
                continue
            path = list(request.tokens)
            for _ in range(2):
                path.append(int(self.model.decoder.law(tuple(path[-3:])).argmax()))
            first, second = path[-2:]
            wrong = len(request.tokens) % 3
            # Chain order is avoided on purpose: the right path is 1, 4.
            drafts.append(Draft([(first + 1) % 320, first, 7, 8, (second + wrong) % 320], [-1, -1, 0, 1, 1]))
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.seen += outcomes

    def close(self, request: Request) -> None:
        self.closed.append(request.id)


def plain(target: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """One request at a time, without a draft."""
    return [Speculator(target).generate([prompt], **options)[0].tokens for prompt in prompts]


def drafter_for(kind: str, fake: Fake, target: Any) -> Any:
    return {
        "good": lambda: fake(0, noise=1.0),
        "bad": lambda: fake(99),
        "lookup": LookupDrafter,
        "tree": lambda: TreeDrafter(target),
    }[kind]()


@pytest.mark.parametrize("gamma", [1, 4, 12])
@pytest.mark.parametrize("kind", ["good", "bad", "lookup", "tree"])
def test_greedy_equals_plain_greedy(fake: Fake, kind: str, gamma: int) -> None:
    target = fake(0)
    expected = plain(target, PROMPTS, max_new_tokens=50)
    alone = Speculator(target, drafter_for(kind, fake, target), draft_length=gamma)
    assert [alone.generate([prompt], max_new_tokens=50)[0].tokens for prompt in PROMPTS] == expected
    batch = Speculator(target, drafter_for(kind, fake, target), draft_length=gamma)
    results = batch.generate(PROMPTS, max_new_tokens=50)
    assert [result.tokens for result in results] == expected
    metrics = total([result.metrics for result in results])
    if kind == "good" or (kind == "tree" and gamma > 4):
        assert metrics.accepted > 60
        assert metrics.tokens_per_round is not None and metrics.tokens_per_round > 1.3
    assert all(not cache.slots for cache in target.decoder.caches)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.6}, {"frequency_penalty": 0.7, "presence_penalty": 0.4}])
def test_penalties_see_the_drafted_prefix(fake: Fake, options: dict[str, Any]) -> None:
    target = fake(0)
    expected = plain(target, PROMPTS, max_new_tokens=40, **options)
    assert expected != plain(target, PROMPTS, max_new_tokens=40)
    results = Speculator(target, fake(0, noise=1.0), draft_length=6).generate(PROMPTS, max_new_tokens=40, **options)
    assert [result.tokens for result in results] == expected
    assert total([result.metrics for result in results]).accepted > 20


@pytest.mark.parametrize("kind", ["good", "bad", "lookup", "tree"])
def test_a_seed_s_text_is_the_same_with_speculation(fake: Fake, kind: str) -> None:
    """50 seeds, alone and in a batch with other seeds beside them."""
    target = fake(0)
    samplings = [Sampling(temperature=0.8, top_p=0.95, seed=seed) for seed in range(50)]
    prompts = [PROMPTS[seed % 4] for seed in range(50)]
    expected = [plain(target, [p], max_new_tokens=16, sampling=s)[0] for p, s in zip(prompts, samplings, strict=True)]
    assert len({tuple(tokens) for tokens in expected}) == 50
    alone = Speculator(target, drafter_for(kind, fake, target), draft_length=6)
    for prompt, sampling, tokens in zip(prompts, samplings, expected, strict=True):
        assert alone.generate([prompt], max_new_tokens=16, sampling=sampling)[0].tokens == tokens
    together = Speculator(target, drafter_for(kind, fake, target), draft_length=6)
    results = together.generate(prompts, max_new_tokens=16, sampling=samplings)
    assert [result.tokens for result in results] == expected
    if kind == "good":
        assert total([result.metrics for result in results]).accepted > 100


def test_rejection_follows_the_distribution_over_two_tokens(
    constant: Callable[[np.ndarray], Any], chi_squared: Callable[[np.ndarray, np.ndarray], float]
) -> None:
    p = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
    q = np.array([0.05, 0.1, 0.2, 0.25, 0.4])
    prompts, samplings = [[1, 2]] * 300, [Sampling(temperature=1.0, seed=seed) for seed in range(300)]

    def pairs(target: Any, draft: Any) -> np.ndarray:
        speculator = Speculator(target, draft, draft_length=3, verify="rejection")
        counts = np.zeros((5, 5))
        for result in speculator.generate(prompts, max_new_tokens=20, sampling=samplings):
            for a, b in zip(result.tokens[::2], result.tokens[1::2], strict=True):
                counts[a, b] += 1
        return counts

    expected = np.outer(p, p)
    for draft in (constant(p), constant(q), LookupDrafter(), None):
        assert chi_squared(pairs(constant(p), draft), expected) > 1e-3
    # The harness sees a distribution that is a little off.
    assert chi_squared(pairs(constant(np.array([0.44, 0.25, 0.17, 0.1, 0.04])), constant(q)), expected) < 1e-3


def test_a_broken_cache_is_noticed(fake: Fake) -> None:
    """truncate that leaves a wrong token at the end: the comparison above fails on it."""
    expected = plain(fake(0), PROMPTS, max_new_tokens=50)
    draft = fake(0, noise=1.0)
    broken = Speculator(fake(0, broken=True), draft, draft_length=4).generate(PROMPTS, max_new_tokens=50)
    assert [result.tokens for result in broken] != expected


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5}])
def test_stopping_is_the_same(fake: Fake, options: dict[str, Any]) -> None:
    """At every token that the plain text could stop at, wherever it falls in a draft."""
    target, draft = fake(0), fake(0, noise=0.7)
    [text] = plain(target, [PROMPTS[0]], max_new_tokens=24, **options)
    for stop in dict.fromkeys(text):
        until = text[: text.index(stop) + 1]
        for gamma in (0, 3, 12):
            [result] = Speculator(target, draft, gamma).generate([PROMPTS[0]], 24, stop=[stop], **options)
            assert result.tokens == until and result.finish == "stop"
            assert result.metrics.new_tokens == len(until)
    for limit in (1, 2, 5, 24):
        for gamma in (0, 3, 12):
            [result] = Speculator(target, draft, gamma).generate([PROMPTS[0]], limit, **options)
            assert result.tokens == text[:limit] and result.finish == "length"


def test_the_model_s_own_stop_tokens(fake: Fake) -> None:
    [text] = plain(fake(0), [PROMPTS[0]], max_new_tokens=24)
    target = fake(0, end_tokens=[text[7]])
    until = text[: text.index(text[7]) + 1]
    assert Speculator(target).generate([PROMPTS[0]], 24)[0].tokens == until
    assert Speculator(target).generate([PROMPTS[0]], 24, stop=())[0].tokens == text


def test_texts_end_with_the_positions(fake: Fake) -> None:
    target, draft = fake(0, max_positions=20), fake(0, noise=0.5, max_positions=14)
    for gamma in (0, 4, 12):
        [result] = Speculator(target, draft, gamma).generate([PROMPTS[0]], max_new_tokens=100)
        assert result.tokens == plain(fake(0), [PROMPTS[0]], max_new_tokens=17)[0] and result.finish == "length"


def test_finished_requests_leave_the_batch(fake: Fake) -> None:
    target = fake(0)
    [text] = plain(target, [PROMPTS[0]], max_new_tokens=20)
    target.decoder.widths.clear()
    Speculator(target).generate([PROMPTS[0], PROMPTS[3]], 20, stop=[text[4]])
    assert target.decoder.widths[0] == len(PROMPTS[0]) + len(PROMPTS[3])
    assert target.decoder.widths[1:5] == [2] * 4 and target.decoder.widths[5:] == [1] * 15


def test_long_prompts_are_fed_in_pieces(fake: Fake) -> None:
    target = fake(0)
    Speculator(target).generate([[i % 300 for i in range(1100)]], 2)
    assert target.decoder.widths == [512, 512, 76, 1]


def test_outcomes_tell_what_was_accepted(fake: Fake) -> None:
    target = fake(0)
    drafter = TreeDrafter(target)
    Speculator(target, drafter, draft_length=8).generate([PROMPTS[0]], 30)
    assert drafter.seen[0].path == [] and drafter.seen[0].length == 0  # the prompt
    assert any(outcome.path == [1, 4] for outcome in drafter.seen)
    for outcome in drafter.seen:
        assert outcome.hidden is not None and outcome.hidden.shape == (outcome.length + 1, 4)
        # The fake's hidden states are lengths of text: they grow by one along the path.
        assert outcome.hidden[:, 0].diff().tolist() == [1.0] * outcome.length
    assert drafter.closed == [0]


def test_a_request_holds_no_noise_when_it_is_done(fake: Fake) -> None:
    """Draft and target share each position's noise; with a large vocabulary it is megabytes."""
    requests: list[Request] = []

    class Watching(LookupDrafter):
        def propose(self, live: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
            requests.extend(live)
            return super().propose(live, budgets)

    Speculator(fake(0), Watching(), draft_length=4).generate(PROMPTS, 20, temperature=1.0)
    noises = {id(request.noise): request.noise for request in requests}.values()
    assert len(noises) == len(PROMPTS) and all(not noise._kept for noise in noises)


def test_metrics_add_up(fake: Fake) -> None:
    speculator = Speculator(fake(0), fake(0, noise=1.0), draft_length=4)
    results = speculator.generate(PROMPTS, max_new_tokens=31)
    metrics = total([result.metrics for result in results])
    assert metrics.requests == 4 and metrics.prompt_tokens == sum(map(len, PROMPTS)) and metrics.new_tokens == 4 * 31
    assert metrics.gained == 4 * 30 == metrics.accepted + metrics.rounds
    assert metrics.target_forwards == metrics.rounds
    assert metrics.target_rows == metrics.rounds + metrics.drafted
    assert len(metrics.drafted_at) == len(metrics.accepted_at) == 4
    assert sum(metrics.draft_lengths) == metrics.rounds and metrics.draft_lengths[4] > 1
    assert metrics.kv_bytes == 8 * (metrics.prompt_tokens + metrics.new_tokens)
    assert metrics.accepted_by_position == pytest.approx(np.divide(metrics.accepted_at, metrics.drafted_at).tolist())
    assert metrics.seconds >= metrics.draft_seconds + metrics.target_seconds + metrics.prompt_seconds > 0
    assert all(times == sorted(times) and len(times) == 31 for times in metrics.arrivals)
    assert set(metrics.report()) == {"tokens_per_second", "ttft_ms", "itl_ms", "latency_ms", "mean_width"}
    alone = Speculator(fake(0)).generate(PROMPTS, max_new_tokens=31)
    assert total([result.metrics for result in alone]).mean_width == 1
    assert Metrics().acceptance_rate is None and Metrics().tokens_per_second is None and total([]) == Metrics()


def test_streams_give_the_same_text_as_generate(fake: Fake) -> None:
    target, draft = fake(0), fake(0, noise=1.0)
    cases: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}]
    for options in cases:
        [result] = Speculator(target, draft, 4).generate([PROMPTS[0]], 60, **options)
        stream = Speculator(target, draft, 4).stream(PROMPTS[0], 60, **options)
        assert stream.finish is None
        pieces = list(stream)
        assert [token for piece in pieces for token in piece.tokens] == result.tokens
        assert "".join(piece.text for piece in pieces) == result.text
        assert stream.finish == "length" and stream.metrics.new_tokens == 60 and len(pieces) < 60


def test_pieces_hold_whole_characters(tokenizer: Any) -> None:
    text = "né → 你好 🙂 � e\u0301nd🙂"
    tokens = tokenizer(text)["input_ids"]
    for size in (1, 2, 3, 5):
        detokenizer = Detokenizer(tokenizer, tokenizer("def ")["input_ids"])
        parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        pieces = [detokenizer.add(part, last=i == len(parts) - 1) for i, part in enumerate(parts)]
        assert "".join(pieces) == text
        assert all(piece.count("�") <= ("�" in text) for piece in pieces) and sum("�" in p for p in pieces) == 1
    # A character that the prompt began, and one that never ends.
    smile = tokenizer("🙂")["input_ids"]
    assert Detokenizer(tokenizer, smile[:2]).add(smile[2:]) == "🙂"
    detokenizer = Detokenizer(tokenizer, [])
    assert detokenizer.add(smile[:2]) == "" and detokenizer.add([], last=True) == "�"


class Interrupting(LookupDrafter):
    """Fails in the third round."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.rounds = itertools.count()
        self.error = error
        self.closed: list[int] = []

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        if next(self.rounds) == 2:
            raise self.error
        return super().propose(requests, budgets)

    def close(self, request: Request) -> None:
        self.closed.append(request.id)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")])
def test_caches_are_freed_whatever_happens(fake: Fake, error: BaseException) -> None:
    target, drafter = fake(0), Interrupting(error)
    with pytest.raises(type(error)):
        Speculator(target, drafter, 4).generate(PROMPTS, 40)
    assert target.decoder.caches[-1].slots == {} and drafter.closed == [0, 1, 2, 3]
    with pytest.raises(type(error)):
        list(Speculator(target, Interrupting(error), 4).stream(PROMPTS[0], 40))
    assert target.decoder.caches[-1].slots == {}


def test_threads_that_share_a_speculator_get_their_own_texts(tiny: Callable[..., Path]) -> None:
    model = load(tiny("llama"), threads=1)
    speculator = Speculator(model, LookupDrafter(), draft_length=3)
    prompts = [[number + 2, 7, number + 2, 7, number + 2] for number in range(8)]
    alone = plain(model, prompts, max_new_tokens=24)
    assert len({tuple(tokens) for tokens in alone}) > len(prompts) // 2

    def texts(prompt: list[int]) -> list[list[int]]:
        streamed = [token for piece in speculator.stream(prompt, 24) for token in piece.tokens]
        return [streamed, *(speculator.generate([prompt], 24)[0].tokens for _ in range(2))]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(texts, prompts))
    finally:
        sys.setswitchinterval(interval)
    assert found == [[tokens] * 3 for tokens in alone]


def test_closing_a_stream_frees_its_cache(fake: Fake) -> None:
    target, draft = fake(0), fake(0, noise=1.0)
    speculator = Speculator(target, draft, draft_length=4)
    stream, other = speculator.stream(PROMPTS[0], 40), speculator.stream(PROMPTS[1], 40)
    for _ in range(3):
        next(stream), next(other)
    assert len(target.decoder.caches[-1].slots) == 2 and len(draft.decoder.caches[-1].slots) == 2
    stream.close()
    assert len(target.decoder.caches[-1].slots) == 1 and len(draft.decoder.caches[-1].slots) == 1
    # Two streams of one speculator do not disturb each other.
    rest = [token for piece in other for token in piece.tokens]
    assert rest == plain(fake(0), [PROMPTS[1]], max_new_tokens=40)[0][-len(rest) :]
    assert target.decoder.caches[-1].slots == {} == draft.decoder.caches[-1].slots


def test_unsound_drafts_are_refused(fake: Fake) -> None:
    class Wrong(LookupDrafter):
        def __init__(self, draft: Draft) -> None:
            super().__init__()
            self.draft = draft

        def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
            return [self.draft]

    for draft, message in [
        (Draft([1, 2, 3, 4, 5], [-1, 0, 1, 2, 3]), "budget of 4"),
        (Draft([1, 2], [-1]), "1 parents"),
        (Draft([1, 2], [1, -1]), "before their children"),
        (Draft([1, 320], [-1, 0]), "vocabulary"),
        (Draft([1], [-1], torch.rand(1, 5)), "probabilities"),
    ]:
        with pytest.raises(ValueError, match=message):
            Speculator(fake(0), Wrong(draft), 4).generate([PROMPTS[0]], 20)
    Speculator(fake(0), Wrong(Draft([1], [-1]))).stream(PROMPTS[0], 20).close()


def test_user_mistakes(fake: Fake, tiny: Callable[..., Path]) -> None:
    target = fake(0, max_positions=30)
    speculator = Speculator(target)
    assert isinstance(speculator.stream("x" * 29, 5), Stream)
    mistakes: list[tuple[tuple[Any, ...], str]] = [
        (([],), "prompt must hold"),
        (("",), "prompt must hold"),
        (([1] * 30,), "30 tokens, but the target has 30 positions"),
        (([1, 320],), "token 320, but the target's vocabulary has the ids 0 to 319"),
        (([1], 0), "max_new_tokens must be at least 1"),
    ]
    for arguments, message in mistakes:
        with pytest.raises(UserError, match=message):
            speculator.stream(*arguments)
    for gamma in (-1, 65):
        with pytest.raises(UserError, match="draft_length must be from 0 to 64"):
            Speculator(target, draft_length=gamma)
    Speculator(target, draft_length=64)
    with pytest.raises(UserError, match="verify must be one of coupled, rejection, typical, but is 'hopeful'"):
        Speculator(target, verify="hopeful")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="typical changes the distribution of the text"):
        Speculator(target, verify="typical")
    Speculator(target, verify="typical", lossy=True)
    with pytest.raises(UserError, match="one sampling for each of the 2 prompts"):
        speculator.generate([[1], [2]], sampling=[Sampling()])
    with pytest.raises(UserError, match="max_batch must be at least 1, but is 0"):
        Speculator(target, max_batch=0)
    with pytest.raises(UserError, match="at least 1 page, but 0 were asked for"):
        CacheOptions(pages=0)
    with pytest.raises(UserError, match="must be one of auto, float32, float16, int8, int4, int3, but is 'int2'"):
        CacheOptions("int2")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["def f(x):", [5, 6, 7]])
def test_one_text_is_no_list_of_texts(text: Any, pair_target: Callable[[str], Path]) -> None:
    speculator = Speculator(load(pair_target("original")))
    with pytest.raises(UserError, match="put it into a list"):
        speculator.generate(text, 4)
    assert len(speculator.generate([text], 4, stop=())) == 1


def test_a_draft_with_another_vocabulary(fake: Fake, tiny: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    target, draft = fake(0), fake(1)
    Speculator(target, draft)
    file = tiny("llama") / "tokenizer.json"
    changed = file.read_text(encoding="utf-8").replace('"<end>"', '"<fin>"')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = changed if name == "tokenizer.json" else (tiny("llama") / name).read_text().replace("<end>", "<fin>")
        (tmp_path / name).write_text(text, encoding="utf-8")
    draft.tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    speculator = Speculator(target, draft)
    assert speculator.drafter.name == "model (re-encoded)"
    assert speculator.generate(PROMPTS, 20)[1].tokens == plain(target, [PROMPTS[1]], max_new_tokens=20)[0]
    with pytest.raises(UserError, match="token 0 is '<end>' in the target and '<fin>' in the draft"):
        require_same_vocabulary(target.tokenizer, draft.tokenizer)


def test_logits_that_are_not_finite_stop_the_run(fake: Fake) -> None:
    target, draft = fake(0), fake(1)
    good = draft.decoder.law
    draft.decoder.law = lambda context: good(context) * float("nan")
    with pytest.raises(UserError, match="the draft's logits"):
        Speculator(target, draft).generate([PROMPTS[0]])
    with pytest.raises(UserError, match="the target's logits"):
        Speculator(draft).generate([PROMPTS[0]])
    assert all(not cache.slots for cache in target.decoder.caches + draft.decoder.caches)


def test_lossless_classes(fake: Fake) -> None:
    exact, other = fake(0), fake(0, exact=False)
    warm = Sampling(temperature=1.0)
    assert lossless_class(exact, "coupled", warm) == lossless_class(exact, "rejection", Sampling()) == "exact"
    assert lossless_class(other, "coupled", warm) == lossless_class(other, "coupled", Sampling()) == "measured"
    assert lossless_class(exact, "rejection", warm) == lossless_class(other, "rejection", warm) == "distribution"
    assert lossless_class(exact, "typical", warm) == "lossy"
    assert lossless_class(exact, "typical", Sampling()) == "exact"  # greedy requests are judged greedily


# The real decoder.


@pytest.fixture
def pair(tiny: Callable[..., Path]) -> Iterator[tuple[Any, Any]]:
    from runtime import load

    yield load(tiny("llama")), load(tiny("llama", num_hidden_layers=1))


def test_the_real_decoder(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    prompts = ["def f(x):\n    return", "import os\nimport os\nimport"]
    cases: list[dict[str, Any]] = [{}, {"temperature": 0.3, "seed": 2}, {"repetition_penalty": 1.2}]
    for options in cases:
        expected = [Speculator(target).generate([p], 30, stop=(), **options)[0].tokens for p in prompts]
        for drafter in (draft, target, LookupDrafter(), TreeBeside()):
            results = Speculator(target, drafter, draft_length=6).generate(prompts, 30, stop=(), **options)
            assert [result.tokens for result in results] == expected
            if drafter is target:
                assert total([result.metrics for result in results]).acceptance_rate == 1


def test_the_adapter(tiny: Callable[..., Path]) -> None:
    """Any other architecture: the same loop, without the promise."""
    from runtime import load

    target = load(tiny("gpt2"))
    assert lossless_class(target, "coupled", Sampling()) == "measured"
    for drafter in (target, LookupDrafter()):
        results = Speculator(target, drafter, 4).generate(["def f(x):", "import os"], 20, stop=())
        assert [len(result.tokens) for result in results] == [20, 20]
        metrics = total([result.metrics for result in results])
        assert metrics.drafted > 0
        if drafter is target:
            assert metrics.acceptance_rate is not None and metrics.acceptance_rate > 0.9


class TreeBeside(LookupDrafter):
    """The lookup's chain, with a wrong sibling before every token: the right path is never contiguous."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        drafts = []
        for draft in super().propose(requests, [budget // 2 for budget in budgets]):
            tokens = [token for right in draft.tokens for token in ((right + 1) % 320, right)]
            parents = [parent for i in range(len(draft.tokens)) for parent in (2 * i - 1, 2 * i - 1)]
            drafts.append(Draft(tokens, parents))
        return drafts


def test_streams_in_a_paged_cache(pair: tuple[Any, Any]) -> None:
    """Too large ones are refused at once; one that is closed or finds no page gives back its own, and no other ends."""
    target, draft = pair
    prompts = [[i + 1, *range(5, 54)] for i in range(3)]
    expected = [Speculator(target).generate([prompt], 100, stop=())[0].tokens for prompt in prompts]
    speculator = Speculator(target, draft, draft_length=4, cache=CacheOptions(pages=4))
    cache = speculator._cache
    with pytest.raises(UserError, match="too small for one request: 193 tokens need 4 pages of 64, and it has 3"):
        Speculator(target, cache=CacheOptions(pages=3)).stream([1] * 50, 143)
    speculator.stream(prompts[0], 100, stop=()).close()  # never begun
    first, closed, second = (speculator.stream(prompt, 100, stop=()) for prompt in prompts)
    texts = [list(next(first).tokens), list(next(closed).tokens)]
    assert cache.pages_free == 2
    closed.close()
    assert cache.pages_free == 3 and list(closed) == []
    # Both can begin; whoever is the first to need a page that the other holds is out.
    with pytest.raises(UserError, match="ran out of pages with one request left in it") as error:
        for _ in range(100):
            texts[0] += next(first).tokens
            next(second)
            next(second)
    assert "\n" not in str(error.value) and first.finish is None
    texts[0] += [token for piece in first for token in piece.tokens]
    assert texts[0] == expected[0] and cache.pages_free == 4
    assert speculator.generate([prompts[2]], 100, stop=())[0].tokens == expected[2] and cache.pages_free == 4


def constant_model(path: Path, probabilities: np.ndarray) -> Path:
    """A Llama whose next-token distribution is known: nothing is added to embeddings of ones, the head holds log p."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, tie_word_embeddings=False)
    model.config.tie_word_embeddings = False
    hidden = model.config.hidden_size
    logits = torch.full((model.config.vocab_size,), -200.0)
    logits[: len(probabilities)] = torch.tensor(probabilities).log()
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight = torch.nn.Parameter((logits / hidden)[:, None].repeat(1, hidden))
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    out = path.parent / f"constant-{probabilities[0]}"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_real_decoder_s_distribution(
    tiny: Callable[..., Path], rule: Any, chi_squared: Callable[[np.ndarray, np.ndarray], float]
) -> None:
    from runtime import load

    p = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
    path = tiny("llama", num_hidden_layers=1)
    target, draft = load(constant_model(path, p)), load(constant_model(path, p[::-1].copy()))
    counts = np.zeros((5, 5))
    speculator = Speculator(target, draft, draft_length=3, verify=rule)
    samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(60)]
    for result in speculator.generate([[7]] * 60, 16, samplings, stop=()):
        for a, b in zip(result.tokens[::2], result.tokens[1::2], strict=True):
            counts[a, b] += 1
    assert chi_squared(counts, np.outer(p, p)) > 1e-3
    assert chi_squared(counts, np.outer(p[::-1], p[::-1])) < 1e-9
