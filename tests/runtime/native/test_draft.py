"""A whole greedy draft in one native call: the tokens, the cache and the errors of drafting step by step."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import load
from runtime.cache.contiguous import ContiguousCache
from runtime.contract import ChainNoise, GreedyChains, Rows, integers
from runtime.errors import UserError
from runtime.kv_store import CacheKind
from runtime.model.native import NativeDecoder
from runtime.native.binding import PATHS, require
from runtime.sampling.distribution import argmax_tokens
from runtime.sampling.noise import exponential, race
from runtime.sampling.params import Sampling
from runtime.sampling.processors import softmax
from runtime.speculative.draft import Request
from runtime.speculative.drafters.model import ModelDrafter

Tiny = Callable[..., Path]
TinyPacked = Callable[[str], Path]
Text = Callable[..., Tensor]

FAMILY = ("llama", "mistral", "qwen3", "gemma", "mixtral")
PACKED = ("int8", "int4", "nf4", "ternary", "int8 static", "mixed")
KINDS: tuple[CacheKind, ...] = ("float32", "int8", "int4")
# Pieces to feed and tokens to draft of four requests.
PIECES, STEPS = (1, 7, 2, 1), (4, 1, 9, 6)


def decoder(path: Path, kernels: str, **options: Any) -> NativeDecoder:
    made = load(path, kernels=kernels, **options).decoder
    assert isinstance(made, NativeDecoder)
    return made


def opened(made: NativeDecoder, text: Text, kind: CacheKind = "float32") -> tuple[ContiguousCache, list[int]]:
    """A cache with texts of 0, 3, 59 and 20 tokens: one draft crosses the border of a key block."""
    cache = made.new_cache(kind)
    handles = [cache.open(80) for _ in PIECES]
    for handle, length in zip(handles, (0, 3, 59, 20), strict=True):
        if length:
            made.forward(text(length, seed=length), Rows.chains([(handle, 0, length)]), cache, integers([]))
    return cache, handles


def spans(cache: ContiguousCache, handles: Sequence[int], counts: Sequence[int]) -> Rows:
    return Rows.chains([(h, cache.length(h), n) for h, n in zip(handles, counts, strict=True)])


def by_steps(made: NativeDecoder, cache: ContiguousCache, handles: Sequence[int], tokens: Tensor, limit: int) -> Tensor:
    """The same draft, one forward per token and request."""
    out = torch.full((len(handles), max(STEPS)), -1)
    for row, (handle, piece) in enumerate(zip(handles, tokens.split(PIECES), strict=True)):
        for step in range(STEPS[row]):
            logits = made.forward(piece, spans(cache, [handle], [len(piece)]), cache).logits[-1]
            out[row, step] = logits[:limit].argmax()
            piece = out[row, step : step + 1]
    return out


def stored(cache: ContiguousCache, request: int) -> list[Tensor]:
    length = cache.length(request)
    parts = [part for layer in range(cache.format.layers) for part in cache.read(layer, request, length)]
    return [part.transpose(1, 2).flatten(0, 1)[:length] for part in parts]


def same_as_by_steps(made: NativeDecoder, text: Text, kind: CacheKind = "float32", limit: int = 320) -> None:
    tokens = text(sum(PIECES), seed=5)
    (one, handles), (other, others) = opened(made, text, kind), opened(made, text, kind)
    drafted = made.continue_greedy(tokens, spans(one, handles, PIECES), one, STEPS, limit)
    assert drafted.dtype == torch.int64
    assert torch.equal(drafted, by_steps(made, other, others, tokens, limit))
    assert int(drafted.max()) < limit and len(drafted.unique()) > 4
    for handle, twin in zip(handles, others, strict=True):
        assert one.length(handle) == other.length(twin)
        assert all(torch.equal(a, b) for a, b in zip(stored(one, handle), stored(other, twin), strict=True))


@pytest.mark.parametrize("limit", [320, 171])
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_sampled_chains_are_those_of_the_race(tiny: Tiny, text: Text, native_path: str, model: str, limit: int) -> None:
    """Beside a greedy one in the same call; the tokens are numpy's step by step, not greedy or another seed's."""
    made, tokens = decoder(tiny(model), native_path), text(sum(PIECES), seed=5)
    (one, handles), (other, others) = opened(made, text), opened(made, text)

    def noise(seed: int) -> list[ChainNoise | None]:
        found: list[ChainNoise | None] = [
            ChainNoise(0.4 + 0.5 * row, [exponential(seed + row, step, 330) for step in range(count)])
            for row, count in enumerate(STEPS)
        ]
        return [None, *found[1:]]

    drawn = noise(7)
    drafted = made.continue_sampled(tokens, spans(one, handles, PIECES), one, STEPS, limit, drawn)
    expected = torch.full_like(drafted, -1)
    for row, (handle, piece, own) in enumerate(zip(others, tokens.split(PIECES), drawn, strict=True)):
        for step in range(STEPS[row]):
            logits = (
                made.forward(piece, spans(other, [handle], [len(piece)]), other).logits[-1, :limit].double().numpy()
            )
            if own is None:
                expected[row, step] = int(logits.argmax())
            else:
                expected[row, step] = race(softmax(logits, own.temperature, 0), own.steps[step][:limit])
            piece = expected[row, step : step + 1]
    assert torch.equal(drafted, expected)
    for different in ([], noise(8)):
        again, fresh = opened(made, text)
        found = made.continue_sampled(tokens, spans(again, fresh, PIECES), again, STEPS, limit, different)
        assert torch.equal(found[0], drafted[0]) and not torch.equal(found, drafted)
    again, fresh = opened(made, text)
    short = [None, None, ChainNoise(1.0, drawn[2].steps[:3]), None]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="a chain of 9 tokens needs noise for each, of"):
        made.continue_sampled(tokens, spans(again, fresh, PIECES), again, STEPS, limit, short)


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}])
def test_sampled_drafts_in_one_call_are_those_step_by_step(tiny: Tiny, sampling: dict[str, Any]) -> None:
    """Of a drafter; where something is cut off, and under `rejection`, they go step by step."""
    model, drafts = load(tiny("llama")), []
    requests = [Request(i, [3, 5 + i], 2, Sampling(temperature=1.0, seed=i, **sampling), 40) for i in range(2)]
    for stepwise in (False, True):
        drafter = ModelDrafter(model)
        assert drafter._in_one_call(requests[0].sampling) == (not sampling)
        if stepwise:
            drafter._chains = None
        drafts.append(drafter.propose(requests, [7, 4]))
    assert drafts[0] == drafts[1] and [len(draft.tokens) for draft in drafts[0]] == [7, 4]
    assert not ModelDrafter(model, "rejection")._in_one_call(requests[0].sampling)


@pytest.mark.parametrize("model", FAMILY)
def test_float_models_draft_as_step_by_step(tiny: Tiny, text: Text, native_path: str, model: str) -> None:
    same_as_by_steps(decoder(tiny(model), native_path), text)


@pytest.mark.parametrize("scheme", PACKED)
def test_packed_models_draft_as_step_by_step(
    tiny_packed: TinyPacked, text: Text, native_path: str, scheme: str
) -> None:
    same_as_by_steps(decoder(tiny_packed(scheme), native_path), text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_cache_and_a_truncated_vocabulary(tiny: Tiny, text: Text, native_path: str, kind: CacheKind) -> None:
    made = decoder(tiny("llama"), native_path)
    for limit in (320, 171):
        same_as_by_steps(made, text, kind, limit)


@pytest.mark.usefixtures("torch_threads")
def test_any_number_of_threads(tiny: Tiny, text: Text, native_path: str) -> None:
    for threads in (1, 2, 3):
        same_as_by_steps(decoder(tiny("mixtral"), native_path, threads=threads), text)


# The choice of a token.

_EDGES = st.sampled_from([0.0, -0.0, 1.0, 1.0, 3e38, -3e38, float("-inf"), float("-inf"), float("inf"), float("nan")])


@settings(deadline=None)
@given(data=st.data(), size=st.integers(1, 1200))
def test_largest_is_what_finite_choices_says(native_path: str, data: st.DataObject, size: int) -> None:
    limit = data.draw(st.integers(1, size))
    row = np.random.default_rng(size).integers(-3, 4, size).astype(np.float32)
    if data.draw(st.integers(0, 9)) == 0:
        row[:] = -np.inf
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, size - 1), _EDGES), max_size=4)):
        row[place] = value
    try:
        argmax_tokens(row[None], "draft")
        want = argmax_tokens(row[None, :limit], "draft")[0]
    except UserError:
        want = -1
    assert require().specpress_largest(PATHS[native_path], row.ctypes.data, size, limit) == want


# What is refused.


def test_what_cannot_be_drafted_is_refused_and_changes_nothing(tiny: Tiny, text: Text, native_path: str) -> None:
    made = decoder(tiny("llama"), native_path)
    cache = made.new_cache()
    first, second = cache.open(64), cache.open(64)
    rows = Rows.chains([(first, 0, 3), (second, 0, 2)])
    tree = Rows(integers([first] * 3 + [second] * 2), integers([0, 1, 1, 0, 1]), integers([-1, 0, 0, -1, 3]))
    for tokens, where, steps, limit, message in (
        (text(5), tree, [2, 2], 320, f"the rows of request {first} are no chain"),
        (text(5), rows, [2], 320, "1 numbers of further slots for 2 requests"),
        (text(5), rows, [2, 2, 2], 320, "3 numbers of further slots for 2 requests"),
        (text(5), rows, [2, 0], 320, "every request needs 1 step or more"),
        (text(5), rows, [2, 2], 0, "the limit must lie in 1..320"),
        (text(5), rows, [2, 2], 321, "the limit must lie in 1..320"),
        (text(5), rows, [2, 64], 320, "0 \\+ 65 tokens do not fit a cache of 64"),
        (text(4), rows, [2, 2], 320, "4 tokens for 5 rows"),
        (torch.tensor([1, 1, 320, 1, 1]), rows, [2, 2], 320, "token ids must lie in 0..319"),
        (text(5).float(), rows, [2, 2], 320, "tokens must be integers"),
        (text(2), Rows.chains([(first, 1, 2)]), [2], 320, "position"),
    ):
        with pytest.raises(ValueError, match=message):
            made.continue_greedy(tokens, where, cache, steps, limit)
        assert cache.length(first) == cache.length(second) == 0
    with pytest.raises(TypeError, match="needs the cache of its new_cache"):
        made.continue_greedy(text(5), rows, object(), [2, 2], 320)  # type: ignore[arg-type]
    assert made.continue_greedy(text(0), Rows.chains([]), cache, [], 320).shape == (0, 0)
    assert made.continue_greedy(text(5), rows, cache, [2, 63], 320).shape == (2, 63)
    assert (cache.length(first), cache.length(second)) == (4, 64)


# In the drafter.


class StepByStep:
    """The decoder without its chains."""

    def __init__(self, made: NativeDecoder) -> None:
        self.vocab_size, self.max_positions = made.vocab_size, made.max_positions
        self.new_cache, self.forward = made.new_cache, made.forward


class HasIt:
    def __init__(self, made: Any) -> None:
        self.decoder = made


def request(tokens: Sequence[int], number: int = 0, sampling: Sampling | None = None) -> Request:
    return Request(number, list(tokens), len(tokens), sampling if sampling is not None else Sampling(), 150)


def drafters(made: NativeDecoder, vocab_size: int = 320) -> tuple[ModelDrafter, ModelDrafter]:
    assert isinstance(made, GreedyChains) and not isinstance(StepByStep(made), GreedyChains)
    return ModelDrafter(HasIt(made), vocab_size=vocab_size), ModelDrafter(
        HasIt(StepByStep(made)), vocab_size=vocab_size
    )


@pytest.mark.parametrize("vocab_size", [200, 320, 400])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_drafter_s_texts_and_cache_stay_in_step(
    tiny: Tiny, text: Text, native_path: str, vocab_size: int, sampled: bool
) -> None:
    """After any acceptance, none and full included. Beside a request that samples, all go step by step."""
    made = decoder(tiny("mistral"), native_path)
    pair, random = drafters(made, vocab_size), torch.Generator().manual_seed(2)
    samplings = [Sampling(), Sampling(), Sampling(temperature=0.9, seed=1) if sampled else Sampling()]
    texts = [[request(text(4 + i, seed=i).tolist(), i, s) for i, s in enumerate(samplings)] for _ in pair]
    for _ in range(10):
        budgets = torch.randint(0, 6, (3,), generator=random).tolist()
        drafts = [d.propose(own, budgets) for d, own in zip(pair, texts, strict=True)]
        assert [d.tokens for d in drafts[0]] == [d.tokens for d in drafts[1]]
        assert [d.parents for d in drafts[0]] == [d.parents for d in drafts[1]]
        assert [len(d.tokens) for d in drafts[0]] == budgets
        for number, budget in enumerate(budgets):
            ours, theirs = (d._texts.get(number) for d in pair)
            assert ours == theirs
            assert ours is None or pair[0]._cache.length(ours.handle) == len(ours.fed)
            accepted = int(torch.randint(0, budget + 1, (1,), generator=random))
            more = [*drafts[0][number].tokens[:accepted], int(torch.randint(0, 320, (1,), generator=random))]
            for own in texts:
                own[number].tokens += more


def with_a_broken_embedding(source: Path, out: Path, token: int) -> Path:
    """The model, in which one token's embedding is NaN: it loads, and any text without the token is sound."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_logits_that_are_no_numbers(tiny: Tiny, text: Text, tmp_path: Path, native_path: str) -> None:
    """The error of step by step, whether the rows that were given cause it or a drafted token; others draft on."""
    source = tiny("mistral")
    prompt = text(6).tolist()
    [sound] = ModelDrafter(HasIt(decoder(source, native_path))).propose([request(prompt)], [4])
    late = sound.tokens[1]
    assert late not in [*prompt, sound.tokens[0]]
    broken = decoder(with_a_broken_embedding(source, tmp_path / "broken", late), native_path)
    for drafter in drafters(broken):
        assert drafter.propose([request(prompt, 1)], [2])[0].tokens == sound.tokens[:2]
        for tokens, budget in (([*prompt, late], 1), (prompt, 4)):
            with pytest.raises(UserError, match="the draft's logits must be finite, but a row holds NaN or Inf"):
                drafter.propose([request(prompt, 1), request(tokens, 2)], [2, budget])
            drafter.close(request(tokens, 2))
        assert drafter.propose([request(prompt, 1)], [2])[0].tokens == sound.tokens[:2]
