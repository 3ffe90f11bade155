"""A Speculator in use: streams, threads, what is left when one is interrupted, and a user's mistakes."""

import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import load
from runtime.errors import UserError
from runtime.sampling.detokenize import Detokenizer, require_same_vocabulary
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions, Speculator, Stream, lossless_class
from runtime.speculative.draft import Draft, Request
from runtime.speculative.drafters.lookup import LookupDrafter
from tests.runtime.speculated import PROMPTS, Fake, plain


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
