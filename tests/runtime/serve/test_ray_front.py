"""The ingress against replicas that die, repeat themselves and leave things out at every place: no text is harmed."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError

from runtime.serve.channel import framed
from runtime.serve.errors import ApiError
from runtime.serve.flight import Bell, Flight
from runtime.serve.ray_config import ClusterConfig
from runtime.serve.ray_engine import Unheard
from runtime.serve.ray_events import Place
from runtime.serve.ray_front import RayFront

ABOUT = {"max_batch": 8, "exact": True, "fingerprint": "a", "pages": 100}
TEXTS, TOKENS = 60, 40
MISHAPS = ("none", "dies", "is cut", "repeats", "leaves out", "ends early", "is unequal", "goes", "is two")


def _right(seed: int) -> list[int]:
    """The text that every replica writes for a request."""
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(TOKENS)]


class Response:
    """Of a call through Ray: what the replica's method returned or raised."""

    def __init__(self, work: Any) -> None:
        self._task = asyncio.ensure_future(work)

    def __await__(self) -> Any:
        return self._task.__await__()

    def cancel(self) -> None:
        """See ray.serve."""
        self._task.cancel()


class Method:
    """A replica's method, as a handle has it."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def remote(self, *values: Any, **named: Any) -> Response:
        """See ray.serve."""
        return Response(self._work(*values, **named))


class Replicas:
    """In place of the handle: each text gets a replica of its own, which has one of the mishaps at a random token."""

    def __init__(self, generator: random.Random, mishaps: Sequence[str]) -> None:
        self._generator, self._mishaps = generator, mishaps
        self.seen: Counter[str] = Counter()
        self.about, self.write = Method(self._about), Method(self._write)

    async def _about(self) -> dict[str, Any]:
        return ABOUT

    async def _write(
        self, asked: dict[str, Any], *, tokens: list[int], place: Place, call: int, fingerprint: str, **_: Any
    ) -> None:
        assert fingerprint == "a" if tokens else fingerprint in ("", "a")
        generator, mishap = self._generator, self._generator.choice(self._mishaps)
        self.seen[mishap] += 1
        host, port, secret = place
        _, writer = await asyncio.open_connection(host, port)

        def tell(*events: Any) -> None:
            writer.write(framed(tuple((call, *event) for event in events)))

        writer.write(secret)
        try:
            if mishap == "is unequal":
                tell(("unequal",))
                return
            text, known = _right(asked["sampling"]["seed"]), len(tokens)
            at = generator.randrange(known, TOKENS + 1)
            tell(("taken", f"replica {call}", "a", (1, 0, 1, 99)))
            while known < TOKENS:
                fresh = text[known : known + generator.randrange(1, 6)]
                event = ("gained", known, fresh, [(fresh, None, [])])
                known += len(fresh)
                if mishap == "leaves out" and known >= at:
                    at = TOKENS + 1
                    continue
                tell(event)
                if known >= at:
                    if mishap == "dies":
                        raise ActorDiedError
                    if mishap == "goes":
                        tell(("gone",))
                        return
                    if mishap == "is cut":  # in the middle of an event
                        data = framed(((call, "gained", known, text[known:], []),))
                        writer.write(data[: generator.randrange(len(data))])
                        raise ActorDiedError
                    if mishap == "is two":  # Ray has asked another one, too, of other kernels
                        _, other = await asyncio.open_connection(host, port)
                        other.write(secret + framed(((call, "taken", "other", "b", (1, 0, 1, 99)),)))
                        other.write(framed(((call, "gained", known, [-1], []),)))
                        await asyncio.sleep(0.002)
                        other.close()
                    if mishap == "repeats":
                        tell(event, event)
                await asyncio.sleep(generator.choice((0, 0.001)))
            if mishap != "ends early":
                tell(("ended", "length", known, {}, (0, 0, 0, 100)))
        finally:
            writer.close()


def _written(mishaps: Sequence[str], seed: int, **told: Any) -> tuple[list[Flight], Replicas]:
    """All texts, once they have ended."""

    async def write() -> list[Flight]:
        config = ClusterConfig(target="x", deaths=1000, patience=30, **told)
        front = RayFront(config.model, Unheard(), replicas, config)  # type: ignore[arg-type]
        await front.start()
        asked = {"prompt": [1, 2], "options": {}, "sampling": {"temperature": 0.7}}
        texts = [front.submit(asked | {"sampling": {"temperature": 0.7, "seed": one}}, Bell()) for one in range(TEXTS)]
        async with asyncio.timeout(60):
            await front.idle.wait()
        await asyncio.sleep(0.05)
        assert not front._calls and not front._writers
        await front.close()
        return texts

    replicas = Replicas(random.Random(seed), mishaps)
    return asyncio.run(write()), replicas


def test_whatever_befalls_replicas_texts_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.serve.ray_front._LATE", 0.05)
    monkeypatch.setattr("runtime.serve.ray_front._RETRY", 0.01)
    texts, replicas = _written(MISHAPS, 1)
    for one, text in enumerate(texts):
        assert text.error is None and text.tokens == _right(one)
        assert [token for detail in text.details for token in detail[0]] == text.tokens
    assert set(replicas.seen) == set(MISHAPS) and sum(text.deaths for text in texts) > TEXTS


def test_without_resuming_they_end_with_an_error_or_right() -> None:
    texts, _ = _written(("none", "dies", "is cut"), 2, resume=False)
    ends = {text.error and text.error.code for text in texts}
    assert ends == {None, "engine_down"}
    for one, text in enumerate(texts):
        assert text.tokens == _right(one)[: len(text.tokens)]
        assert (text.tokens == _right(one)) or isinstance(text.error, ApiError)
