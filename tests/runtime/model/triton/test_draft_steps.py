"""Drafts without waiting: the tokens, the cache and the errors of drafting step by step."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import load
from runtime.contract import GreedyChains, Rows, integers
from runtime.model.on_device import NON_FINITE, DeviceRounds, RowSampling
from runtime.model.triton.batch import Shape
from runtime.model.triton.cache import GpuCache
from runtime.model.triton.decoder import TritonDecoder
from runtime.sampling.params import Sampling

Tiny = Callable[..., Path]
Text = Callable[..., Tensor]
# Of three requests: tokens before, pieces to feed, tokens to draft. One draft crosses the border of a page.
LENGTHS, PIECES, STEPS = (0, 63, 2), (3, 1, 2), (2, 3, 1)
WAYS = (Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=1.2, seed=4, top_p=0.9))
ALIKE = tuple(Sampling(temperature=0.8, seed=seed, top_k=60, top_p=0.9) for seed in (3, 2**64 - 5, 9))


def opened(made: TritonDecoder, text: Text, lengths: tuple[int, ...] = LENGTHS) -> tuple[GpuCache, list[int]]:
    cache = made.new_cache("int8")
    handles = [cache.open(80) for _ in PIECES]
    tokens = torch.cat([text(length, seed=length) for length in lengths if length])
    rows = Rows.chains([(handle, 0, length) for handle, length in zip(handles, lengths, strict=True) if length])
    made.forward(tokens, rows, cache, integers([]))
    return cache, handles


def spans(cache: GpuCache, handles: Sequence[int], counts: Sequence[int]) -> Rows:
    return Rows.chains([(h, cache.length(h), n) for h, n in zip(handles, counts, strict=True)])


def qwen(small: Tiny, device: str) -> TritonDecoder:
    path = small("qwen3", num_hidden_layers=1, layer_types=["full_attention"])
    made = load(path, device=device, kernels="triton").decoder
    assert isinstance(made, TritonDecoder)
    return made


def test_drafts_are_those_of_step_by_step(small: Tiny, text: Text, device: str) -> None:
    """Greedy ones of the whole vocabulary, sampled ones of a part; forks part when they are written to."""
    made = qwen(small, device)
    assert isinstance(made, GreedyChains) and isinstance(made, DeviceRounds)
    cache, handles = opened(made, text)
    tokens = text(sum(PIECES), seed=5)
    for ways, limit in (((Sampling(),) * 3, 320), (ALIKE, 171)):
        ours, theirs = [cache.fork(handle) for handle in handles], [cache.fork(handle) for handle in handles]
        if ways is ALIKE:
            drafted = made.draft(tokens, spans(cache, ours, PIECES), cache, STEPS, limit, ways).tolist()
        else:
            drafted = made.continue_greedy(tokens, spans(cache, ours, PIECES), cache, STEPS, limit).tolist()
            assert [row[count:] for row, count in zip(drafted, STEPS, strict=True)] == [[-1], [], [-1, -1]]
        for row, (handle, piece) in enumerate(zip(theirs, tokens.split(PIECES), strict=True)):
            for step in range(STEPS[row]):
                logits = made.forward(piece, spans(cache, [handle], [len(piece)]), cache).logits[-1:, :limit]
                [token], _ = made.next_tokens(logits, [RowSampling(ways[row], cache.length(handle))])
                assert drafted[row][step] == token < limit
                piece = integers([token])
            assert cache.length(ours[row]) == cache.length(handle)
    more = text(2, seed=8)
    pair = [made.forward(more, spans(cache, which[:2], [1, 1]), cache).logits for which in (ours, theirs)]
    assert torch.equal(*pair)


def test_drafts_at_once_are_those_of_single_steps(
    small: Tiny, text: Text, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that choose in several ways, or feed too much, are drafted step by step; others as one run."""
    made = qwen(small, device)
    cache, handles = opened(made, text, (0, 5, 2))
    tokens = text(sum(PIECES), seed=5)
    stepped = []
    steps = TritonDecoder._drafted
    monkeypatch.setattr(TritonDecoder, "_drafted", lambda *arguments: stepped.append(1) or steps(*arguments))

    forks = [cache.fork(handle) for handle in handles]
    together = made.draft(tokens, spans(cache, forks, PIECES), cache, STEPS, 171, WAYS)
    assert len(stepped) == 1
    for row, piece in enumerate(tokens.split(PIECES)):
        one, count = [cache.fork(handles[row])], STEPS[row]
        alone = made.draft(piece, spans(cache, one, PIECES[row : row + 1]), cache, [count], 171, [WAYS[row]])
        assert len(stepped) == 1 and torch.equal(alone[0], together[row, :count])

    monkeypatch.setattr("runtime.model.triton.decoder.WIDEST", 3)
    forks = [cache.fork(handle) for handle in handles[:2]]
    wide = made.draft(tokens[:4], spans(cache, forks, PIECES[:2]), cache, STEPS[:2], 171, WAYS[:1] * 2)
    assert len(stepped) == 2 and torch.equal(wide[0], together[0, : wide.shape[1]])


def test_a_round_reads_nothing_but_its_block(
    small: Tiny, text: Text, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph would replay: the launches of the first round of a shape, with the inputs of the next."""
    made = qwen(small, device)
    cache, handles = opened(made, text, (3, 5, 2))
    feeds = [text(3, seed=1), text(3, seed=2)]
    rounds = [((2, 1), ALIKE[:2], (1, 3)), ((1, 2), ALIKE[1:], (3, 2))]

    def run() -> list[list[list[int]]]:
        found = []
        for tokens, (pieces, how, steps) in zip(feeds, rounds, strict=True):
            forks = [cache.fork(handle) for handle in handles[:2]]
            drafted = made.draft(tokens, spans(cache, forks, pieces), cache, steps, 171, how).tolist()
            found.append([row[:count] for row, count in zip(drafted, steps, strict=True)])
        return found

    want = run()
    first: dict[Shape, Callable[[], Tensor]] = {}
    asked: list[Shape] = []

    def replay(pool: object, shape: Shape, forward: Callable[[], Tensor]) -> Tensor:
        asked.append(shape)
        return first.setdefault(shape, forward)()

    monkeypatch.setattr(made._graphs, "_memory", None)
    monkeypatch.setattr(made._graphs, "run", replay)
    assert run() == want and want[0] != want[1]
    assert len(asked) == 2 and len(first) == 1


def test_drafted_rows_and_their_choices_come_together(small: Tiny, text: Text, device: str) -> None:
    made = load(small("llama", num_hidden_layers=1), device=device, kernels="triton").decoder
    assert isinstance(made, TritonDecoder)
    tokens, drafted = text(5), text(3, seed=1)
    cache = made.new_cache()
    want = made.forward(torch.cat((tokens, drafted)), Rows.chains([(cache.open(8), 0, 8)]), cache).logits
    placeholders = torch.cat((tokens, torch.zeros(3, dtype=torch.int64)))
    rows = Rows.chains([(cache.open(8), 0, 8)])
    there = drafted.to(made.device)
    got = made.forward_drafted(placeholders, rows, cache, integers([4, 5, 6, 7]), there, [5, 6, 7]).logits
    assert torch.equal(got, want[4:])
    choices, known = made.next_tokens(got, [RowSampling(Sampling(), 0)] * 4, there.view(1, 3))
    assert choices == want[4:].argmax(dim=-1).tolist() and known == [drafted.tolist()]


def test_logits_that_are_no_numbers(small: Tiny, text: Text, device: str) -> None:
    made = load(small("mistral", num_hidden_layers=1), device=device, kernels="triton").decoder
    assert isinstance(made, TritonDecoder)
    made.parts.embedding[7] = torch.nan  # type: ignore[index]
    cache = made.new_cache()
    rows = Rows.chains([(cache.open(20), 0, 3), (cache.open(20), 0, 2)])
    tokens = integers([5, 7, 6, 5, 6])
    drafted = made.draft(tokens, rows, cache, [2, 2], 320).tolist()
    assert drafted[0] == [NON_FINITE, NON_FINITE] and NON_FINITE not in drafted[1]
    cache = made.new_cache()
    rows = Rows.chains([(cache.open(20), 0, 3), (cache.open(20), 0, 2)])
    with pytest.raises(FloatingPointError, match="NaN or Inf"):
        made.continue_greedy(tokens, rows, cache, [1, 2], 320)


def test_numbers_that_cannot_be(small: Tiny, device: str) -> None:
    made = load(small("llama", num_hidden_layers=1), device=device, kernels="triton").decoder
    assert isinstance(made, TritonDecoder)
    cache = made.new_cache()
    rows = Rows.chains([(cache.open(20), 0, 1)])
    for steps, limit, why in (([0], 320, "1 step or more"), ([1], 0, "must lie in 1..320"), ([1], 321, "must lie in")):
        with pytest.raises(ValueError, match=why):
            made.draft(integers([1]), rows, cache, steps, limit)
    for ways in ([Sampling()] * 2, [Sampling(repetition_penalty=1.2)]):
        with pytest.raises(ValueError, match="1 requests need as many samplings, all of which must be plain"):
            made.draft(integers([1]), rows, cache, [1], 320, ways)
    assert made.draft(integers([]), Rows.chains([]), cache, [], 320).shape == (0, 0)
