"""Events from replicas to the ingress: in order, whole, from those alone who know the secret; and both ends part."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.serve.ray_events import Event, EventLine, EventServer


class Growing:
    """A text of random pieces, which come between the looks at it."""

    def __init__(self, generator: random.Random, length: int) -> None:
        self.tokens = [generator.randrange(1000) for _ in range(length)]
        self._generator, self._sent, self.told = generator, 0, False

    def news(self) -> Iterator[Event]:
        """See ray_events.Telling."""
        if self.told:
            return
        count = self._generator.randrange(5)
        fresh = self.tokens[self._sent : self._sent + count]
        if fresh:
            yield ("gained", self._sent, fresh, None)
        self._sent += len(fresh)
        if self._sent == len(self.tokens):
            self.told = True
            yield ("ended", "length")


class Heard:
    """What an ingress hears."""

    def __init__(self) -> None:
        self.events: list[tuple[int, Event]] = []
        self.lost: list[object] = []
        self.server = EventServer(lambda _, call, event: self.events.append((call, event)), self.lost.append)

    def tokens(self, call: int) -> list[int]:
        """Of a text, in the order in which they came."""
        return [token for one, event in self.events if one == call and event[0] == "gained" for token in event[2]]


async def _until(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.002)


def test_texts_of_two_replicas_arrive_in_order_and_whole() -> None:
    async def talk() -> None:
        heard, generator = Heard(), random.Random(1)
        place = await heard.server.start("127.0.0.1")
        lines = [await EventLine.to(place) for _ in range(2)]
        texts = {call: Growing(generator, generator.randrange(1, 90)) for call in range(30)}

        async def ring() -> None:
            while True:
                for line in lines:
                    line.bell.ring()
                await asyncio.sleep(0)

        ringing = asyncio.create_task(ring())
        await asyncio.gather(*(lines[call % 2].tell(call, text) for call, text in texts.items()))
        await _until(lambda: sum(event == ("ended", "length") for _, event in heard.events) == len(texts))
        ringing.cancel()
        for call, text in texts.items():
            assert heard.tokens(call) == text.tokens
            assert [event[0] for one, event in heard.events if one == call].index("ended") == (
                sum(one == call for one, _ in heard.events) - 1
            )
        await lines[0].close()
        await _until(lambda: len(heard.lost) == 1)
        heard.server.close()
        await _until(lambda: lines[1].closed)
        with pytest.raises(ConnectionError):
            await lines[1].tell(99, Growing(generator, 5))
        await lines[1].close()

    asyncio.run(talk())


def test_an_ingress_that_goes_ends_what_is_told_to_it() -> None:
    async def talk() -> None:
        heard = Heard()
        line = await EventLine.to(await heard.server.start("127.0.0.1"))
        telling = asyncio.create_task(line.tell(1, Growing(random.Random(2), 10_000)))
        await _until(lambda: line.bell.ring() or heard.events)
        heard.server.close()
        with pytest.raises(ConnectionError):
            await telling
        await line.close()

    asyncio.run(talk())


def test_who_does_not_know_the_secret_is_not_heard() -> None:
    async def talk() -> None:
        heard = Heard()
        host, port, secret = await heard.server.start("127.0.0.1")
        other = bytes([secret[0] ^ 1]) + secret[1:]
        line = await EventLine.to((host, port, other))
        with pytest.raises(ConnectionError):
            await line.tell(1, Growing(random.Random(3), 50))
        await line.close()
        assert not heard.events
        known = await EventLine.to((host, port, secret))
        telling = asyncio.create_task(known.tell(1, Growing(random.Random(3), 1)))
        while not telling.done():
            known.bell.ring()
            await asyncio.sleep(0)
        await _until(lambda: len(heard.events) == 2)
        await known.close()
        heard.server.close()

    asyncio.run(talk())
