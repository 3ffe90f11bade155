"""The engine: requests join, leave, wait and are put back, and no text depends on it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import Speculator
from runtime.batching import MIXED_ROWS, PREFILL_ROWS, Engine
from runtime.controller import Controller
from runtime.drafters import Request
from runtime.drafters.lookup import LookupDrafter
from runtime.drafters.model import ModelDrafter
from runtime.errors import UserError
from runtime.metrics import Metrics
from runtime.sampling import Sampling
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

    def shortage(self, needs: Mapping[int, int]) -> int:
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
