"""Drafters that read the target's hidden states get those of every token that stays, each once, whatever happens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import Model, Speculator, load
from runtime.contract import GreedyRows, Rows
from runtime.engine.engine import Engine
from runtime.engine.metrics import Metrics
from runtime.engine.requests import RequestOptions, make_request
from runtime.errors import UserError
from runtime.model.base import BaseDecoder
from runtime.sampling.params import Sampling
from runtime.speculative.draft import Draft, Outcome, Request, TakenStates
from runtime.speculative.draft_length import Controller
from runtime.speculative.drafters.fallback import ChainedDrafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.measured import Round

Tiny = Callable[..., Path]


class Reader:
    """Drafts what the text will be, now and then wrongly, as a tree; checks that it reads every state once."""

    name = "reader"

    def __init__(self, taps: tuple[int, ...], texts: Sequence[Sequence[int]] = ()) -> None:
        self.taps, self._texts = taps, {tuple(text[:3]): text for text in texts}
        self.known: dict[int, tuple[int, torch.Tensor]] = {}
        self.begun: list[int] = []
        self.closed: list[int] = []

    def read(self, taken: Sequence[TakenStates]) -> None:
        for part in taken:
            if part.request.id not in self.known:
                self.known[part.request.id] = part.start, part.states[:0]
                self.begun.append(part.start)
            first, states = self.known[part.request.id]
            assert part.start == first + len(states)
            self.known[part.request.id] = first, torch.cat([states, part.states])

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        found = []
        for request, budget in zip(requests, budgets, strict=True):
            if request.id not in self.known:  # all but its last token was in the cache
                found.append(Draft())
                continue
            first, states = self.known[request.id]
            assert first + len(states) == len(request.tokens) - 1
            ahead = list(self._texts[tuple(request.tokens[:3])][len(request.tokens) :])
            tokens, parents = ([*ahead[:1], 1, *ahead[1:2], 2], [-1, -1, 0, 2]) if len(ahead) > 1 else ([5], [-1])
            found.append(Draft(tokens[:budget], parents[:budget]))
        return found

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if not outcome.request.finished:
                first, states = self.known[outcome.request.id]
                assert first + len(states) == len(outcome.request.tokens) - 1

    def close(self, request: Request) -> None:
        if request.id in self.known:
            self.closed.append(request.id)
            del self.known[request.id]


class Keeps(Reader):
    """Remembers what it knew of each text when it ended."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ended: list[tuple[list[int], int, torch.Tensor]] = []

    def close(self, request: Request) -> None:
        if request.id in self.known:
            self.ended.append((list(request.tokens), *self.known[request.id]))
        super().close(request)


@pytest.fixture(scope="module")
def target(tiny: Tiny, kernels: str) -> Model:
    return load(tiny("llama"), kernels=kernels)


def texts(target: Model) -> list[list[int]]:
    prompts = [[5, 9, 7, 3], [11, 2, 300] * 30, [1, 1, 8], [40, 41, 42] * 200]
    prompts[3] = prompts[3][:200]
    results = Speculator(target).generate(prompts, 20, stop=())
    return [result.prompt_tokens + result.tokens for result in results]


def expected(target: Model, tokens: list[int], taps: tuple[int, ...]) -> torch.Tensor:
    assert isinstance(target.decoder, BaseDecoder)
    cache = target.decoder.new_cache()
    rows = Rows.chains([(cache.open(len(tokens)), 0, len(tokens))])
    found = target.decoder.tapped(taps).forward(torch.tensor(tokens), rows, cache, torch.tensor([0])).taken
    assert found is not None
    return found


def run(engine: Engine, target: Model, known: Sequence[list[int]], new: int = 20) -> list[Request]:
    requests = [
        make_request(target, text[: len(text) - new], new, Sampling(), (), RequestOptions(), id=i)
        for i, text in enumerate(known)
    ]
    for request in requests:
        engine.add(request, Metrics())
    while engine.busy:
        engine.step()
    return requests


@pytest.mark.parametrize("taps", [(2, 0), (1,)])
def test_every_token_that_stays_is_read_once(target: Model, taps: tuple[int, ...]) -> None:
    """Prompts in pieces beside drafts, trees of which the second branch is wrong, three texts at once."""
    known = texts(target)
    drafter = Keeps(taps, known)
    engine = Engine(target.decoder, drafter, 4, "coupled", target.decoder.new_cache(), max_batch=3)
    requests = run(engine, target, known)
    assert [request.tokens for request in requests] == known and drafter.begun == [0] * 4
    for tokens, first, states in drafter.ended:
        # What the last round accepted is not read any more.
        assert first == 0 and len(tokens) - 5 <= len(states) < len(tokens)
        assert torch.equal(states, expected(target, tokens, taps)[: len(states)])


class Wrong(Reader):
    """Never right, whatever it reads; states that never came are no error, but for the last one before a draft."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        super().__init__(taps)
        self.ends: dict[int, int] = {}
        self.gaps = self.drafts = 0

    def read(self, taken: Sequence[TakenStates]) -> None:
        for part in taken:
            self.gaps += part.request.id in self.ends and part.start > self.ends[part.request.id]
            assert part.start >= self.ends.get(part.request.id, 0)
            self.ends[part.request.id] = part.start + len(part.states)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        for request, budget in zip(requests, budgets, strict=True):
            assert not budget or self.ends[request.id] == len(request.tokens) - 1
        self.drafts += any(budgets)
        return [Draft.chain([319] * budget) for budget in budgets]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        assert not any(outcome.length for outcome in outcomes)

    def close(self, request: Request) -> None:
        self.ends.pop(request.id, None)


class Steady(Controller):
    """Is told that all forwards take as long, and drafts a tenth of it: so it does the same on any machine."""

    def rested(self, seconds: float) -> None:
        super().rested(0.01)

    def observe(self, found: Round) -> None:
        super().observe(found._replace(draft_seconds=0.001 * (found.budget > 0), target_seconds=0.01))


def test_nothing_is_read_while_a_controller_rests(target: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Speculator(target).generate([[number, 7, 9] for number in range(4)], 100, stop=())
    known = [result.prompt_tokens + result.tokens for result in results]
    assert all(319 not in text for text in known)
    assert isinstance(target.decoder, BaseDecoder)
    forwards = {(): 0, (1,): 0}
    name = "forward_greedy" if isinstance(target.decoder, GreedyRows) else "forward"
    forward = getattr(type(target.decoder), name)

    def counted(self: BaseDecoder, *arguments: Any) -> Any:
        forwards[self.taps] += 1
        return forward(self, *arguments)

    monkeypatch.setattr(type(target.decoder), name, counted)
    drafter, controller = Wrong((1,)), Steady()
    for text in known * 2:
        engine = Engine(target.decoder, drafter, controller, "coupled", target.decoder.new_cache())
        assert run(engine, target, [text], 100)[0].tokens == text
    assert forwards[()] > 2 * forwards[(1,)] > 0 and drafter.gaps and drafter.drafts > 3
    # With a fixed length there is no rest.
    before = dict(forwards)
    engine = Engine(target.decoder, Wrong((1,)), 2, "coupled", target.decoder.new_cache())
    assert run(engine, target, known[:1], 100)[0].tokens == known[0]
    assert forwards[()] == before[()] and forwards[(1,)] > before[(1,)]


def test_preempted_texts_begin_anew(target: Model) -> None:
    prompts = [[number, *range(7, 66)] for number in (1, 2)]
    results = Speculator(target).generate(prompts, 20, stop=())
    known = [result.prompt_tokens + result.tokens for result in results]
    drafter = Keeps((1,), known)
    # Two pages each at the end, of which there are three.
    engine = Engine(target.decoder, drafter, 4, "coupled", target.decoder.new_cache(pages=3))
    requests = run(engine, target, known)
    assert [request.tokens for request in requests] == known
    assert len(drafter.begun) > len(known)
    for tokens, first, states in drafter.ended:
        assert torch.equal(states, expected(target, tokens, (1,))[first : first + len(states)])


def test_states_of_known_prefixes_never_come(target: Model) -> None:
    known = texts(target)[-1:]
    drafter = Keeps((1,), known)
    engine = Engine(target.decoder, drafter, 4, "coupled", target.decoder.new_cache(pages=9))
    for _ in range(2):
        assert run(engine, target, known)[0].tokens == known[0]
    assert drafter.begun[0] == 0 < drafter.begun[1]
    for tokens, first, states in drafter.ended:
        assert torch.equal(states, expected(target, tokens, (1,))[first : first + len(states)])


def test_readers_in_chains_and_beside_each_other(target: Model) -> None:
    known = texts(target)
    chained = ChainedDrafter([LookupDrafter(), Keeps((2,), known)])
    assert chained.taps == (2,)
    other = Keeps((1, 2), known)
    engine = Engine(target.decoder, {"chain": chained, "other": other}, 4, "coupled", target.decoder.new_cache())
    requests = [
        make_request(target, text[:-20], 20, Sampling(), (), RequestOptions(drafter=name), id=i)
        for i, (text, name) in enumerate(zip(known, ["chain", "other", "other", "none"], strict=True))
    ]
    for request in requests:
        engine.add(request, Metrics())
    while engine.busy:
        engine.step()
    assert [request.tokens for request in requests] == known and len(other.ended) == 2
    for tokens, _, states in other.ended:
        assert torch.equal(states, expected(target, tokens, (1, 2))[: len(states)])
    with pytest.raises(UserError, match="at most one drafter"):
        ChainedDrafter([other, Keeps((1,))])


def test_targets_without_hidden_states_are_refused(tiny: Tiny) -> None:
    target = load(tiny("gpt2"))
    with pytest.raises(UserError, match="use another drafter"):
        Engine(target.decoder, Reader((1,)), 4, "coupled", target.decoder.new_cache())
    assert Engine(target.decoder, LookupDrafter(), 4, "coupled", target.decoder.new_cache()).busy is False
