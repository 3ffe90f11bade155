"""The engine's process: loads the model, then runs rounds; takes requests in between, and sends what each round gave.

From the server come

    ("add", id, asked)      a text to write: the fields that `requested` reads
    ("cancel", id)          a text that nobody wants any more
    ("logits", id, tokens, first, count)  the logits of a given text, a piece of it

and to it go

    ("loading",) ("beat",)  once a second, so that a process that hangs is noticed
    ("failed", sentence)    the model cannot be loaded
    ("ready", about)        what the server has to know of the model
    ("accepted", id)        the engine has the request
    ("refused", id, why)    it never will; why: None for a bug, which the process has told on standard error
    ("piece", id, logits)   bytes of float32; None where a bug came in between, which standard error tells
    ("round", events, counts, when)  an event for each text that gained tokens or ended: (id, tokens, details, end);
                            `when` by the clock that both processes read
"""

import faulthandler
import gc
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from runtime.errors import UserError
from runtime.serve.channel import Channel, Closed, Message
from runtime.serve.settings import ModelSettings

if TYPE_CHECKING:
    from runtime.engine.engine import Engine
    from runtime.engine.metrics import Metrics
    from runtime.model.load import Model
    from runtime.serve.scoring import Scoring
    from runtime.speculative.draft import Request

BEAT = 1.0  # seconds
GAP = 0.002  # the same: a small model's rounds are shorter, and to tell of each wakes the server each time
REST = 0.001  # the same, after a text's first tokens: the server and the client need a core to pass them on
_IDLE = 60.0  # seconds of one wait for messages
_COMPILING = 0.002  # the same while a grammar is being compiled


def main(end: socket.socket, settings: ModelSettings) -> None:
    """Runs until the server's end of the socket is closed."""
    # Ctrl-C and a service manager's SIGTERM reach every process of a group; the server says when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # where it is, asked for by a server that hears nothing of it
    channel = Channel(end)
    stop = threading.Event()
    threading.Thread(target=_beats, args=(channel, stop), daemon=True).start()
    try:
        served = _load(channel, settings)
        if served is not None:
            served.run()
    except Closed:
        pass
    finally:
        stop.set()


def _beats(channel: Channel, stop: threading.Event) -> None:
    try:
        while not stop.wait(BEAT):
            channel.send(("beat",))
    except Closed:
        pass


def _load(channel: Channel, settings: ModelSettings) -> "Worker | None":
    from runtime.serve.engines import cache_options, opened
    from runtime.serve.scoring import Scoring

    try:
        model, engine, about = opened(settings)
    except UserError as error:
        channel.send(("failed", str(error)))
        while channel.unsent:
            channel.wait(_IDLE)
        return None
    except MemoryError:
        channel.send(("failed", "this machine has too little memory for the model: take a smaller one"))
        return None
    # What is there now stays: the garbage collector need not look through it again and again between rounds.
    gc.collect()
    gc.freeze()
    channel.send(("ready", about))
    return Worker(channel, model, engine, Scoring(model, cache_options(settings)))


class Worker:
    """The engine and the texts that it writes. `sent` counts the tokens of each that the server knows."""

    def __init__(self, channel: Channel, model: "Model", engine: "Engine", scoring: "Scoring") -> None:
        self._channel, self._model, self._engine, self._scoring = channel, model, engine, scoring
        self._live: dict[int, tuple[Request, Metrics]] = {}
        self._sent: dict[int, int] = {}
        self._told: dict[int, int] = {}  # of rounds
        self._spoke = 0.0
        self._compiled: deque[tuple[int, dict[str, Any], Future[Any]]] = deque()
        self._grammars: Any = None
        self._pool = ThreadPoolExecutor(1, "grammar")

    def run(self) -> None:
        """Rounds, and messages between them, until the server is gone."""
        engine, channel = self._engine, self._channel
        while True:
            if not engine.busy:
                channel.wait(_COMPILING if self._compiled else _IDLE)
            for message in channel.receive():
                channel.flush()  # the next round may be a long one: it may read a prompt
                self._take(message)
            while self._compiled and self._compiled[0][2].done():
                id_, asked, future = self._compiled.popleft()
                self._add(id_, asked, future)
            if engine.busy:
                self._tell(engine.step())

    def _tell(self, changed: "Sequence[Request]") -> None:
        """What these texts gained; a text's first tokens and its end at once, others every GAP seconds."""
        now = time.monotonic()
        first = any(self._sent[request.id] == request.prompt_length for request in changed)
        at_once = first or now - self._spoke >= GAP or any(request.finished for request in changed)
        message = ("round", [self._event(request) for request in changed], tuple(self._engine.counts()), now)
        if not at_once:
            self._channel.hold(message)
            return
        self._channel.send(message)
        self._spoke = now
        if first:
            time.sleep(REST)

    def _take(self, message: Message) -> None:
        kind, id_ = message[0], message[1]
        if kind == "add":
            asked = message[2]
            if asked["structure"] is None:
                self._add(id_, asked, None)
            else:
                self._compiled.append((id_, asked, self._pool.submit(self._compile, asked["structure"])))
        elif kind == "logits":
            self._read(*message[1:])
        elif kind == "cancel":
            waiting = [entry for entry in self._compiled if entry[0] == id_]
            for entry in waiting:
                self._compiled.remove(entry)
            if id_ in self._live:
                request, _ = self._live[id_]
                self._engine.cancel(request)
                ended = self._ended(request, "cancelled")
                self._channel.send(("round", [ended], tuple(self._engine.counts()), time.monotonic()))

    def _read(self, id_: int, tokens: list[int], first: int, count: int) -> None:
        try:
            piece = self._scoring.piece(tokens, first, count)
        except Exception as error:
            _log(error)
            piece = None
        self._channel.send(("piece", id_, piece))

    def _compile(self, structure: tuple[str, str, str]) -> Any:
        """The grammar of a structure, in a thread of its own: the engine's rounds go on meanwhile."""
        from runtime.sampling.grammar import GrammarCompiler
        from runtime.sampling.stopping import resolve
        from runtime.sampling.structure import Structure

        if self._grammars is None:
            model, size = self._model, self._model.decoder.vocab_size
            self._grammars = GrammarCompiler(model.tokenizer, size, resolve(None, model, size)[0])
        kind, text, whitespace = structure
        return self._grammars.compile(Structure(kind, text, whitespace))  # type: ignore[arg-type]

    def _add(self, id_: int, asked: dict[str, Any], grammar: "Future[Any] | None") -> None:
        from runtime.engine.metrics import Metrics
        from runtime.serve.engines import requested

        try:
            request = requested(self._model, id_, asked, None if grammar is None else grammar.result())
            metrics = Metrics()
            if not request.finished:
                self._engine.add(request, metrics)
        except UserError as error:
            self._channel.send(("refused", id_, str(error)))
            return
        except Exception as error:
            # A bug of ours over one request: the others go on.
            _log(error)
            self._channel.send(("refused", id_, None))
            return
        self._channel.send(("accepted", id_))
        self._live[id_] = (request, metrics)
        self._sent[id_] = len(request.tokens)
        self._told[id_] = 0
        if request.finished:
            self._tell([request])

    def _event(self, request: "Request") -> Message:
        """What a text gained since its last event."""
        from runtime.engine.requests import finish_reason

        if request.finished:
            return self._ended(request, finish_reason(request))
        return (request.id, *self._gained(request), None)

    def _gained(self, request: "Request") -> tuple[list[int], Message | None]:
        """New tokens; and where something was asked of them (log-probabilities, prompt's, rounds), else None."""
        sent = self._sent[request.id]
        tokens = request.tokens[sent:]
        self._sent[request.id] = sent + len(tokens)
        wanted, found = request.wanted, request.found
        if not wanted:
            return tokens, None
        first = sent == request.prompt_length
        logprobs = list(map(tuple, found.logprobs[-len(tokens) :])) if tokens and found.logprobs else []
        prompt = [entry and tuple(entry) for entry in found.prompt_logprobs] if first else None
        told = self._told[request.id]
        rounds = [tuple(one) for one in found.rounds[told:]]
        self._told[request.id] = told + len(rounds)
        return tokens, (logprobs, prompt, rounds)

    def _ended(self, request: "Request", why: str) -> Message:
        from runtime.sampling.constraint import TooHeavyError

        gained = self._gained(request)
        _, metrics = self._live.pop(request.id)
        del self._sent[request.id], self._told[request.id]
        error = request.error
        sentence = None if error is None else str(error) if isinstance(error, UserError) else ""
        if error is not None and sentence == "":
            _log(error)
        if isinstance(error, TooHeavyError):
            why = "refused"
        return (request.id, *gained, (why, sentence, _figures(metrics)))


def _log(error: Exception) -> None:
    import sys
    import traceback

    traceback.print_exception(error, file=sys.stderr)


def _figures(metrics: "Metrics") -> dict[str, Any]:
    """A request's metrics as plain values, without the times of single tokens."""
    found = {key: value for key, value in asdict(metrics).items() if key != "arrivals"}
    return found | {"drafter_faults": dict(metrics.drafter_faults)}
