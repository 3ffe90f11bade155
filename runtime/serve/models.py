"""The models that a server has: loaded beside one another, switched whole, let go when their last text has ended."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from runtime.serve.admission import Admission
from runtime.serve.errors import ApiError, unavailable
from runtime.serve.flight import Bell, Flight
from runtime.serve.front import Front
from runtime.serve.metrics import Meter, Registry
from runtime.serve.settings import Limits, ModelSettings
from runtime.serve.vocabulary import Vocabulary, import_tokenizers


class Writes(Protocol):
    """Who writes a model's texts: `Front`, with an engine beside it, or a cluster's front with many."""

    about: dict[str, Any]
    flights: dict[int, Flight]
    state: str
    idle: asyncio.Event

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """See Front."""

    @property
    def restarts(self) -> int:
        """See Front."""

    @property
    def pid(self) -> int | None:
        """See Front."""

    @property
    def replicas(self) -> Sequence[dict[str, Any]]:
        """Of a cluster: who writes texts."""

    async def start(self) -> None:
        """See Front."""

    def submit(self, asked: dict[str, Any], bell: Bell) -> Flight:
        """See Front."""

    def cancel(self, flight: Flight) -> None:
        """See Front."""

    async def logits(self, tokens: list[int], first: int, count: int) -> bytes:
        """See Front."""

    def tick(self) -> None:
        """See Front."""

    async def close(self) -> None:
        """See Front."""


MakesFront = Callable[[ModelSettings, Meter], Writes]


@dataclass(frozen=True)
class Served:
    """One model that answers."""

    name: str
    front: Writes
    vocabulary: Vocabulary
    admission: Admission
    meter: Meter
    end_tokens: frozenset[int]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def about(self) -> dict[str, Any]:
        """What the engine's process says of the model."""
        return self.front.about


class Models:
    """The models by the names that clients use; the first is taken where a request names none."""

    def __init__(
        self, registry: Registry, limits: Limits, template: str | None = None, front: MakesFront | None = None
    ) -> None:
        """front: who writes a model's texts; None: a process beside this one."""
        self._registry, self._limits, self._template = registry, limits, template
        self._front: MakesFront = front or (lambda settings, meter: Front(settings, meter, limits.stall))
        self._served: dict[str, Served] = {}
        self._leaving: dict[asyncio.Task[None], Served] = {}
        self._loading = asyncio.Lock()

    def __iter__(self) -> Any:
        return iter(list(self._served.values()))

    @property
    def ready(self) -> bool:
        """Whether every model answers."""
        return bool(self._served) and all(one.front.state == "ready" for one in self._served.values())

    @property
    def in_flight(self) -> int:
        """Texts that have not ended."""
        return sum(len(one.front.flights) for one in self._all())

    def get(self, name: str | None) -> Served:
        """The model of this name. Raises ApiError 404, or 503 before there is any."""
        if not self._served:
            raise unavailable("no model is loaded", "loading", 5)
        if name is None:
            return next(iter(self._served.values()))
        if name not in self._served:
            known = ", ".join(self._served)
            shown = name[:100].encode("ascii", "backslashreplace").decode()
            raise ApiError(
                404, f"the model {shown!r} is not served here; there is {known}", param="model", code="model_not_found"
            )
        return self._served[name]

    async def load(self, settings: ModelSettings) -> Served:
        """Loads a model whole, then gives it its name; whoever had that goes when its texts have ended.

        Raises UserError where it cannot be loaded; then everything is as it was.
        """
        async with self._loading:
            meter = Meter(self._registry, settings.name)
            front = self._front(settings, meter)
            # While the engine's process imports the same and loads the weights.
            imported = asyncio.create_task(asyncio.to_thread(import_tokenizers))
            await front.start()
            try:
                await imported
                vocabulary = await asyncio.to_thread(
                    Vocabulary, front.about["model"], front.about["vocab_size"], self._template
                )
            except BaseException:
                await front.close()
                raise
            ends = frozenset(front.about["end_tokens"])
            if not ends and vocabulary.tokenizer.eos_token_id is not None:
                ends = frozenset([vocabulary.tokenizer.eos_token_id])
            admission = Admission(self._limits, front.about["max_batch"])
            served = Served(settings.name, front, vocabulary, admission, meter, ends)
            before = self._served.get(settings.name)
            self._served[settings.name] = served
            if before is not None:
                self._let_go(before)
            return served

    def unload(self, name: str) -> None:
        """Takes a model's name away; its texts end. Raises ApiError."""
        served = self.get(name)
        del self._served[name]
        self._let_go(served)

    def _let_go(self, served: Served) -> None:
        async def leave() -> None:
            await served.front.idle.wait()
            await served.front.close()

        task = asyncio.create_task(leave())
        self._leaving[task] = served
        task.add_done_callback(self._leaving.pop)

    def tick(self) -> None:
        """Once a second."""
        for served in self._all():
            served.front.tick()

    def gauge(self) -> None:
        """Sets the figures that rise and fall to what they are now."""
        for served in self._served.values():
            running, waiting, used, free = served.front.counts
            self._registry.running.labels(served.name).set(running)
            self._registry.waiting.labels(served.name).set(waiting)
            self._registry.cache.labels(served.name).set(used / (used + free) if used + free else 0.0)

    async def close(self) -> None:
        """Ends every process."""
        every = self._all()
        for task in list(self._leaving):
            task.cancel()
        await asyncio.gather(*(served.front.close() for served in every))

    def _all(self) -> list[Served]:
        """Those that still write a text, too."""
        return [*self._served.values(), *self._leaving.values()]
