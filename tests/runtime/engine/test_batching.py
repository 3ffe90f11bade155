"""The engine: requests join, leave, wait and are put back, and no text depends on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from runtime import Model, Speculator, load
from runtime.contract import Out
from runtime.engine.engine import Engine
from runtime.engine.metrics import Clock, Metrics
from runtime.engine.schedule import MIXED_ROWS, PREFILL_ROWS
from runtime.errors import UserError
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.draft import Draft, Request
from runtime.speculative.draft_length import Controller
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.model import ModelDrafter
from tests.runtime.conftest import ListCache

Fake = Callable[..., Any]


@dataclass
class TightCache(ListCache):
    """A cache of `room` tokens for all requests together, in pages of one token."""

    room: int = 10**9

    def open(self, capacity: int) -> int:
        if capacity > self.room:
            raise UserError(f"a request of {capacity} tokens does not fit a cache of {self.room}")
        return super().open(capacity)

    def missing_pages(self, needs: Mapping[int, int]) -> int:
        used = sum(len(slots) for slots in self.slots.values())
        return max(0, used + sum(needs.values()) - self.room)


def request(number: int, prompt: list[int], new: int = 20, **options: Any) -> Request:
    return Request(number, list(prompt), len(prompt), Sampling(**options), new)


def prompts(count: int, longest: int = 12) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 300, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def engine(target: Any, drafter: Any, length: Any = 4, cache: Any = None, **options: Any) -> Engine:
    return Engine(target.decoder, drafter, length, "coupled", cache or target.decoder.new_cache(), **options)


def finish(running: Engine) -> None:
    for _ in range(10_000):
        if not running.busy:
            return
        running.step()
    raise AssertionError("the engine does not come to an end")


def alone(fake: Fake, one: Request) -> list[int]:
    target = fake(0)
    [result] = Speculator(target).generate([one.tokens[: one.prompt_length]], one.max_new_tokens, one.sampling, stop=())
    return result.tokens


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_order_of_joining_cancelling_and_pressure_gives_the_same_texts(fake: Fake, data: st.DataObject) -> None:
    target, draft = fake(0), fake(0, noise=1.0)
    cache = TightCache(room=data.draw(st.integers(40, 150), "room"))
    drafter = data.draw(st.sampled_from([ModelDrafter(draft), LookupDrafter()]), "drafter")
    length = data.draw(st.sampled_from([0, 3, Controller()]), "gamma")
    running = engine(target, drafter, length, cache, max_batch=data.draw(st.integers(1, 6), "batch"))
    options = [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.3}]
    requests = [request(i, p, 8 + i, **options[i % 3]) for i, p in enumerate(prompts(8))]
    gone = set()
    for one in requests:
        running.add(one, Metrics())
        for _ in range(data.draw(st.integers(0, 4))):
            running.step()
        if data.draw(st.integers(0, 7)) == 0:
            victim = data.draw(st.sampled_from(requests[: one.id + 1]))
            running.cancel(victim)
            gone.add(victim.id)
    finish(running)
    assert not cache.slots and all(not held.slots for held in draft.decoder.caches)
    for one in requests:
        expected = alone(fake, one)
        if one.id in gone:
            assert one.new_tokens == expected[: len(one.new_tokens)]
        else:
            assert one.finished and one.new_tokens == expected


def test_the_youngest_is_put_back_and_loses_nothing(fake: Fake) -> None:
    cache = TightCache(room=60)
    running = engine(fake(0), LookupDrafter(), 4, cache)
    requests, metrics = [request(i, p, 30) for i, p in enumerate(prompts(3, 4))], [Metrics() for _ in range(3)]
    for one, measured in zip(requests, metrics, strict=True):
        running.add(one, measured)
    finish(running)
    assert [one.new_tokens for one in requests] == [alone(fake, one) for one in requests]
    assert metrics[0].preemptions == 0 and metrics[2].preemptions > 0
    # The oldest, which was never put back, ends first.
    assert metrics[0].arrivals[0][-1] < metrics[2].arrivals[0][-1]
    roomy = [Metrics() for _ in range(3)]
    running = engine(fake(0), LookupDrafter(), 4, TightCache(room=200))
    for i, measured in enumerate(roomy):
        running.add(request(i, prompts(3, 4)[i], 30), measured)
    finish(running)
    assert sum(measured.preemptions for measured in roomy) == 0


def test_a_request_that_can_never_fit_is_refused_at_once_and_others_go_on(fake: Fake) -> None:
    cache = TightCache(room=50)
    running = engine(fake(0), LookupDrafter(), 4, cache)
    good = request(0, [1, 2, 3])
    running.add(good, Metrics())
    running.step()
    with pytest.raises(UserError, match="does not fit a cache of 50"):
        running.add(request(1, [1] * 40), Metrics())
    finish(running)
    assert good.new_tokens == alone(fake, good) and not cache.slots


def test_waiting_requests_begin_in_their_order(fake: Fake) -> None:
    running = engine(fake(0), LookupDrafter(), 2, max_batch=2)
    requests = [request(i, p, 6) for i, p in enumerate(prompts(5))]
    for one in requests:
        running.add(one, Metrics())
    begun: list[int] = []
    while running.busy:
        gained = running.step()
        assert len(gained) <= 2
        begun += [one.id for one in gained if one.id not in begun]
    assert begun == [0, 1, 2, 3, 4]


def test_a_long_prompt_does_not_stop_the_others(fake: Fake) -> None:
    target = fake(0)
    running = engine(target, LookupDrafter(), 0)
    talking = request(0, [1, 2, 3], 40)
    running.add(talking, Metrics())
    running.step()
    long = request(1, [7] * (3 * MIXED_ROWS + 10), 5)
    running.add(long, Metrics())
    target.decoder.widths.clear()
    for _ in range(4):
        before = len(talking.tokens)
        running.step()
        assert len(talking.tokens) == before + 1
    assert target.decoder.widths == [MIXED_ROWS + 1] * 3 + [11] and len(long.new_tokens) == 1
    finish(running)
    assert [talking.new_tokens, long.new_tokens] == [alone(fake, talking), alone(fake, long)]
    # With nobody waiting for a next token the pieces are larger.
    target.decoder.widths.clear()
    running.add(request(2, [5] * (PREFILL_ROWS + 1), 1), Metrics())
    finish(running)
    assert target.decoder.widths == [PREFILL_ROWS, 1]


def test_times_add_up_to_the_clock(fake: Fake) -> None:
    running = engine(fake(0), ModelDrafter(fake(0, noise=0.5)), 3)
    metrics = [Metrics() for _ in range(4)]
    began = running.clock.now()
    for i, (prompt, measured) in enumerate(zip(prompts(4), metrics, strict=True)):
        running.add(request(i, prompt), measured)
    finish(running)
    whole = running.clock.now() - began
    assert 0.8 * whole < sum(m.seconds for m in metrics) <= whole
    for m in metrics:
        assert m.new_tokens == 20 and m.gained == 19 and 0 < m.prompt_seconds < m.seconds
        assert 0 < m.draft_seconds + m.target_seconds < m.seconds and m.arrivals[0] == sorted(m.arrivals[0])


def test_what_a_drafter_first_reads_is_told_from_its_steps(fake: Fake) -> None:
    class Stopped(Clock):
        seconds = 0.0

        def now(self) -> float:
            return self.seconds

    class Slow(ModelDrafter):
        def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
            drafts = super().propose(requests, budgets)
            clock.seconds += sum(10.0 if one.id not in known else 0.0 for one in requests)
            known.update(one.id for one in requests)
            clock.seconds += 0.25 * sum(len(draft.tokens) for draft in drafts)
            return drafts

    clock, known, measured = Stopped(), set[int](), Metrics()
    running = engine(fake(0), Slow(fake(0, noise=0.5)), 3, clock=clock)
    running.add(request(0, prompts(1)[0]), measured)
    finish(running)
    assert measured.first_drafted == 3 and measured.drafted > 6
    assert measured.first_seconds == pytest.approx(10.75)
    assert measured.draft_step_ratio(0.5) == pytest.approx(0.5)
    assert measured.draft_cost_ratio(0.5) == pytest.approx(0.5 + 20 / measured.drafted)


def test_cancelled_before_it_began(fake: Fake) -> None:
    running = engine(fake(0), LookupDrafter(), 4, max_batch=1)
    first, second = request(0, [1, 2]), request(1, [3, 4])
    running.add(first, Metrics())
    running.add(second, Metrics())
    running.step()
    running.cancel(second)
    finish(running)
    assert first.finished and not second.new_tokens
    running.cancel(first)  # it has ended: nothing happens
    running.close()


# Pages of the real decoder: whatever happens to a request, they come back, and the others write what they would alone.


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., Path]) -> tuple[Model, Model]:
    return load(tiny("llama")), load(tiny("llama", num_hidden_layers=1))


def alone_for_real(target: Model, one: Request) -> list[int]:
    prompt = one.tokens[: one.prompt_length]
    return Speculator(target).generate([prompt], one.max_new_tokens, one.sampling, stop=())[0].tokens


def long_prompts(count: int) -> list[list[int]]:
    return np.random.default_rng(1).integers(1, 300, (count, 50)).tolist()


def test_running_out_of_pages_loses_no_text_and_no_page(pair: tuple[Model, Model]) -> None:
    target, draft = pair
    cache = target.decoder.new_cache("int8", 5)
    running = engine(target, ModelDrafter(draft), 4, cache)
    requests, metrics = [request(i, p, 60) for i, p in enumerate(long_prompts(4))], [Metrics() for _ in range(4)]
    for one, measured in zip(requests, metrics, strict=True):
        running.add(one, measured)
    finish(running)
    assert sum(measured.preemptions for measured in metrics) > 0 and metrics[0].preemptions == 0
    plain = Speculator(target, cache=CacheOptions("int8"))
    expected = plain.generate([one.tokens[:50] for one in requests], 60, stop=())
    assert [one.new_tokens for one in requests] == [result.tokens for result in expected]
    assert cache.pages_free == 5


@pytest.mark.parametrize("moment", ["waiting", "in its prompt", "in its text", "put back"])
def test_cancelling_gives_all_pages_back(pair: tuple[Model, Model], moment: str) -> None:
    target, draft = pair
    drafter = ModelDrafter(draft)
    pages = 3 if moment == "put back" else 12
    cache = target.decoder.new_cache("float32", pages)
    running = engine(target, drafter, 4, cache, max_batch=1 if moment == "waiting" else 4)
    other, measured = request(0, long_prompts(2)[0], 120), Metrics()
    victim = request(1, [7, 8] * 85 if moment == "in its prompt" else long_prompts(2)[1], 70)
    running.add(other, Metrics())
    running.step()
    running.add(victim, measured)
    reached = {
        "waiting": lambda: True,
        "in its prompt": lambda: cache.pages_free < pages - 2,
        "in its text": lambda: len(victim.new_tokens) > 3,
        "put back": lambda: measured.preemptions > 0,
    }[moment]
    while not reached():
        assert running.busy
        running.step()
    free, begun = cache.pages_free, len(victim.new_tokens)
    assert (begun > 0) == (moment in ("in its text", "put back")) and not other.finished and not victim.finished
    running.cancel(victim)
    # Who waits or was put back holds none.
    assert (cache.pages_free > free) == (moment in ("in its prompt", "in its text"))
    finish(running)
    assert other.new_tokens == alone_for_real(target, other)
    assert victim.new_tokens == alone_for_real(target, victim)[:begun]
    assert cache.pages_free == pages and not drafter._texts


def test_a_request_larger_than_the_pages_is_refused_when_it_comes(pair: tuple[Model, Model]) -> None:
    target, _ = pair
    cache = target.decoder.new_cache("float32", 3)
    running = engine(target, LookupDrafter(), 4, cache)
    good = request(0, long_prompts(1)[0], 100)
    running.add(good, Metrics())
    running.step()
    with pytest.raises(UserError, match="too small for one request: 193 tokens need 4 pages of 64, and it has 3"):
        running.add(request(1, [5], 192), Metrics())
    running.add(request(2, [5], 191), Metrics())
    finish(running)
    assert good.new_tokens == alone_for_real(target, good) and cache.pages_free == 3


class Failing(LookupDrafter):
    """Fails when it is asked for the fourth time."""

    calls = 0

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("boom")
        return super().propose(requests, budgets)


def test_a_drafter_that_fails_in_the_middle_of_a_round(pair: tuple[Model, Model]) -> None:
    """Closing frees everything; a caller who steps again goes on as if nothing had been."""
    target, _ = pair
    for going_on in (False, True):
        cache, drafter = target.decoder.new_cache("float32", 9), Failing()
        running = engine(target, drafter, 4, cache)
        requests = [request(i, p, 40) for i, p in enumerate(long_prompts(3))]
        for one in requests:
            running.add(one, Metrics())
        with pytest.raises(RuntimeError, match="boom"):
            finish(running)
        assert cache.pages_free < 9 and drafter._texts
        if going_on:
            finish(running)
            assert [one.new_tokens for one in requests] == [alone_for_real(target, one) for one in requests]
        running.close()
        assert not running.busy and cache.pages_free == 9 and not drafter._texts


class Interrupted:
    """A decoder that is interrupted at its n-th forward: after it has taken its slots, before it has written them."""

    def __init__(self, decoder: Any, at: int) -> None:
        self.__dict__.update(vars(decoder))
        self.decoder, self.at = decoder, at

    def forward(self, tokens: Any, rows: Any, cache: Any, logits_at: Any = None) -> Out:
        self.at -= 1
        if self.at == 0:
            for handle in rows.request.unique().tolist():
                cache.reserve(handle, int((rows.request == handle).sum()))
            raise KeyboardInterrupt
        return self.decoder.forward(tokens, rows, cache, logits_at)  # type: ignore[no-any-return]


@pytest.mark.parametrize("at", [1, 2, 5])
def test_nobody_adopts_what_an_interrupted_forward_did_not_write(pair: tuple[Model, Model], at: int) -> None:
    target, _ = pair
    cache = target.decoder.new_cache("float32", 20)
    prompt = [*long_prompts(1)[0], *range(1, 100)]
    broken = engine(SimpleNamespace(decoder=Interrupted(target.decoder, at)), LookupDrafter(), 4, cache)
    broken.add(request(0, prompt, 90), Metrics())
    with pytest.raises(KeyboardInterrupt):
        finish(broken)
    broken.close()
    assert cache.pages_free == 20
    running, again, measured = engine(target, LookupDrafter(), 4, cache), request(1, prompt, 90), Metrics()
    running.add(again, measured)
    finish(running)
    assert again.new_tokens == alone_for_real(target, again)
    assert measured.reused_tokens == (0 if at == 1 else 128)


class _Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func).removeprefix("aten.").partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gamma", [0, 4])
def test_nothing_between_two_forwards_wakes_torchs_threads(
    gamma: int, tiny_packed: Callable[[str], Path], native_path: str
) -> None:
    """They would spin for milliseconds on the cores that the kernels' own threads need next."""
    model = load(tiny_packed("int8"), kernels=native_path)
    running = engine(model, LookupDrafter(), gamma)

    def whole() -> None:
        for number, prompt in enumerate(prompts(3)):
            running.add(request(number, prompt * 3, 12), Metrics())
        finish(running)

    whole()  # makes the tables that are kept
    with _Operations() as seen:
        whole()
    # Views, and memory as it is: none of these touches elements, so none is shared out among threads.
    assert seen.names <= {
        "lift_fresh",
        "empty",
        "detach",
        "slice",
        "select",
        "view",
        "as_strided",
        "alias",
        "_unsafe_view",
    }
    assert "lift_fresh" in seen.names
