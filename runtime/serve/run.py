"""A request's texts while they are written: places taken, taken back when the client leaves, told of as they grow."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from runtime.serve.flight import Bell, Flight
from runtime.serve.plan import Plan
from runtime.serve.texts import Scored

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass
class Fresh:
    """What one text gained since it was last looked at. `finish`: why it ended, if it has."""

    tokens: list[int]
    text: str
    scored: list[Scored]
    rounds: list[Any]
    finish: str | None


class Progress:
    """One text, and how much of it has been taken."""

    def __init__(self, plan: Plan, place: int, flight: Flight) -> None:
        self.plan, self.place, self.flight = plan, place, flight
        self.prompt_scored: list[Scored | None] = []
        self._text = plan.text(place)
        self._tokens = 0
        self._details = 0
        self._ended = False

    def take(self) -> Fresh | None:
        """What is new; None where nothing is. Raises ApiError where the text ended with an error."""
        flight = self.flight
        if self._ended or (len(flight.tokens) == self._tokens and not flight.ended):
            return None
        tokens = flight.tokens[self._tokens :]
        self._tokens += len(tokens)
        scored: list[Scored] = []
        rounds: list[Any] = []
        for logprobs, prompt, told in flight.details[self._details :]:
            scored += logprobs
            rounds += told
            if prompt is not None:
                self.prompt_scored = prompt
        self._details = len(flight.details)
        if flight.error is not None:
            self._ended = True
            raise flight.error
        self._ended = flight.ended
        return Fresh(tokens, self._text.add(tokens, flight.ended), scored, rounds, flight.finish)


@dataclass
class Run:
    """The texts of a plan in flight. The places of its model are given back by `close`, which every way out calls."""

    plan: Plan
    places: int
    bell: Bell = field(default_factory=Bell)
    texts: list[Progress] = field(default_factory=list)
    _waiting: Any = None
    _closed: bool = False

    async def begin(self) -> None:
        """Sends the texts on their way; returns when the engine has taken them. Raises ApiError where it does not."""
        served = self.plan.served
        served.admission.queue(self.plan.prompt_tokens * self.plan.n)
        self._waiting = self.plan.prompt_tokens * self.plan.n
        self.texts = [
            Progress(self.plan, place, served.front.submit(asked, self.bell))
            for place, asked in enumerate(self.plan.asked)
        ]
        flights = [one.flight for one in self.texts]
        while not all(flight.accepted for flight in flights):
            await self.bell.heard()
            for flight in flights:
                if flight.error is not None:
                    raise flight.error
        self.bell.ring()

    async def next(self) -> list[tuple[Progress, Fresh]]:
        """Waits, and tells of each text that has something new; nothing where only a second has passed."""
        await self.bell.heard()
        if self._waiting and all(one.flight.first is not None or one.flight.ended for one in self.texts):
            self.plan.served.admission.unqueue(self._waiting)
            self._waiting = 0
        found = [(one, fresh) for one in self.texts if (fresh := one.take()) is not None]
        if found:
            self.bell.told()
        return found

    async def whole(self) -> list[Fresh]:
        """Each text from its beginning to its end, which it may have reached before anybody asks."""
        found = [Fresh([], "", [], [], None) for _ in self.texts]
        while True:
            for one, fresh in await self.next():
                gathered = found[one.place]
                gathered.tokens += fresh.tokens
                gathered.text += fresh.text
                gathered.scored += fresh.scored
                gathered.rounds += fresh.rounds
                gathered.finish = fresh.finish
            if self.ended:
                return found

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return all(one.flight.ended for one in self.texts)

    @property
    def fingerprint(self) -> str:
        """Of the engines that write the texts: one, or, on a cluster of unequal ones, each with a plus between."""
        return "+".join(dict.fromkeys(one.flight.fingerprint for one in self.texts if one.flight.fingerprint))

    def close(self) -> None:
        """Ends what has not ended, and gives the places back."""
        if self._closed:
            return
        self._closed = True
        served = self.plan.served
        for one in self.texts:
            served.front.cancel(one.flight)
        if self._waiting:
            served.admission.unqueue(self._waiting)
        served.admission.release(self.places)

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage` so far."""
        new = sum(len(one.flight.tokens) for one in self.texts)
        prompt = self.plan.prompt_tokens
        out: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        figures = [one.flight.figures for one in self.texts if one.flight.figures]
        reused = sum(min(one["reused_tokens"], one["prompt_tokens"]) for one in figures)
        out["prompt_tokens_details"] = {"cached_tokens": reused}
        if self.plan.prediction:
            drafted = sum(sum(one["drafted_at"]) for one in figures)
            accepted = sum(sum(one["accepted_at"]) for one in figures)
            out["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        return out


async def gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientGone(Exception):  # noqa: N818 (a state, not a mistake)
    """Nobody waits for the answer."""


async def unless_gone(work: Awaitable[Any], receive: Receive) -> Any:
    """The result of `work`; ClientGone, and the work is cancelled, where the client leaves first."""
    doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        return doing.result()
    finally:
        watching.cancel()
        if not doing.done():
            doing.cancel()


def round_shown(plan: Plan, event: Any) -> dict[str, Any]:
    """One round as `specpress.rounds` tells it."""
    drafter, tokens, parents, path, gained, draft_milliseconds, milliseconds = event
    return {
        "drafter": drafter,
        "drafted": [
            {"id": token, "text": plan.served.vocabulary.shown(token), "parent": parent, "accepted": place in path}
            for place, (token, parent) in enumerate(zip(tokens, parents, strict=True))
        ],
        "gained": list(gained),
        "draft_ms": round(draft_milliseconds, 4),
        "ms": round(milliseconds, 4),
    }
