"""Structured output: a `Constraint` from a `Structure`, by llguidance (extra `serve`).

A grammar is compiled for a tokenizer, once; each text has a matcher, which stands at its end. Which tokens may follow
is a function of the text alone, as a logit bias is one of nothing: so greedy decoding, `coupled` and `rejection` stay
what they are. Where only one text can follow, only the tokens that the tokenizer makes of it are allowed (as far as no
later character changes them); these are offered as a draft, and verified as any other.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError
from runtime.sampling import grammar_worker
from runtime.sampling.constraint import TooHeavyError
from runtime.sampling.structure import Structure

if TYPE_CHECKING:
    from llguidance import LLMatcher

COMPILE_SECONDS = 2.0
_START_SECONDS = 60.0
_KEPT = 64
# Between any two tokens of JSON, where it is not compact.
_PRETTY = r"[\x20\x0A\x0D\x09]{1,8}"
_META = frozenset(r"\.+*?()|[]{}^$#&-~")


class Matcher:
    """The `Constraint` of one text, which begins where the prompt ends; see there for its methods.

    What follows an end token is nothing to the text, so anything may.
    """

    def __init__(self, at: "LLMatcher", vocab_size: int, ends: Collection[int]) -> None:
        self._at = at
        self._vocab_size, self._ends = vocab_size, frozenset(ends)
        # A copy costs less than a microsecond; it stands at the text's end and `path`.
        self._ahead, self._path = at, list[int]()

    def allows(self, path: Sequence[int], token: int) -> bool:
        if not self._ends.isdisjoint(path):
            return True
        return token < self._vocab_size and bool(self._words(path)[token >> 3] >> (token & 7) & 1)

    def mask(self, path: Sequence[int]) -> NDArray[np.bool_]:
        if not self._ends.isdisjoint(path):
            return np.ones(self._vocab_size, dtype=np.bool_)
        bits = np.unpackbits(np.frombuffer(self._words(path), dtype=np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(np.bool_)

    def valid(self, tokens: Sequence[int]) -> int:
        return int(self._at.validate_tokens(list(tokens)))

    def forced(self, most: int) -> list[int]:
        return list(self._at.compute_ff_tokens()[:most])

    def advance(self, tokens: Sequence[int]) -> None:
        written = [token for token in tokens if token not in self._ends]
        if self._ahead is not self._at and self._path == written:
            self._at = self._ahead
        elif not self._at.consume_tokens(written):
            _require_sound(self._at)
            raise UserError("the text holds a token that its grammar does not allow; ask without it.")
        self._ahead, self._path = self._at, []

    def _words(self, path: Sequence[int]) -> bytes:
        """The mask after the text and `path`, a bit for each token."""
        matcher = self._went(path)
        words: bytes = matcher.compute_bitmask()
        _require_sound(matcher)
        return words

    def _went(self, path: Sequence[int]) -> "LLMatcher":
        """The matcher after the text and `path`."""
        known = len(self._path)
        if len(path) < known or list(path[:known]) != self._path:
            self._ahead, self._path, known = self._at, [], 0
        if len(path) > known:
            ahead = self._at.deep_copy() if known == 0 else self._ahead
            if not ahead.consume_tokens(list(path[known:])):
                self._ahead, self._path = self._at, []
                _require_sound(ahead)
                raise UserError("a path holds a token that the grammar does not allow.")
            self._ahead, self._path = ahead, list(path)
        return self._ahead


def _require_sound(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        raise TooHeavyError(
            f"the text's grammar took too much to follow ({_first_line(matcher.get_error())}); simplify it."
        )


class Grammar:
    """A compiled structure. Texts may share it. `ends` are the tokens that end one."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, ends: Sequence[int]) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self.ends = tuple(ends)

    def matcher(self) -> Matcher:
        """A new text's constraint."""
        return Matcher(self._matcher.deep_copy(), self._vocab_size, self.ends)


class GrammarCompiler:
    """Makes grammars for one tokenizer; threads may share it.

    tokenizer   a fast tokenizer of transformers.
    vocab_size  the decoder's number of logits.
    ends        the tokens that end a text: allowed where the grammar is complete.

    Raises UserError without llguidance, for another kind of tokenizer, or without end tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Collection[int]) -> None:
        if find_spec("llguidance") is None:
            raise UserError(
                "structured output needs llguidance, which is not installed: pip install 'specpress[serve]'"
            )
        if not ends:
            raise UserError("structured output needs a token that ends a text, and this model names none.")
        from llguidance import LLTokenizer

        self._vocab_size, self._ends = vocab_size, sorted(ends)
        about = _written(tokenizer)
        words = max(vocab_size, len(tokenizer))
        try:
            self._tokenizer = LLTokenizer(about, n_vocab=words, eos_token=self._ends)
        except Exception as error:
            raise UserError(f"no grammar can be followed with this tokenizer ({_first_line(str(error))}).") from error
        self._trial = _Trial({"tokenizer": about, "vocab": words, "ends": self._ends})
        self._known: OrderedDict[Structure, Grammar] = OrderedDict()
        self._turn = threading.Lock()

    def compile(self, structure: Structure) -> Grammar:
        """The grammar of a structure.

        It is first tried in another process, which is killed after COMPILE_SECONDS; what comes through is compiled
        here without Python's lock, so that other threads go on. The last ones are kept.
        Raises UserError for what cannot be enforced, or takes too long.
        """
        from llguidance import LLMatcher

        with self._turn:
            if (known := self._known.get(structure)) is not None:
                self._known.move_to_end(structure)
                return known
        source = _source(structure)
        if error := self._trial.error(source):
            raise _refusal(structure, error)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=grammar_worker.limits())  # type: ignore[arg-type]
        if matcher.is_error():
            raise _refusal(structure, matcher.get_error())
        made = Grammar(matcher, self._vocab_size, self._ends)
        with self._turn:
            self._known[structure] = made
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return made

    def close(self) -> None:
        """Ends the other process."""
        self._trial.close()


class _Trial:
    """The process in which grammars are tried (grammar_worker.py); it begins with the first one."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._about = about
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._turn = threading.Lock()

    def error(self, source: str) -> str:
        """What is wrong with a grammar; empty where nothing is."""
        with self._turn:
            if self._process is None or self._process.poll() is not None:
                self._start()
            found = self._ask({"grammar": source}, COMPILE_SECONDS)
            if found is None:
                self._stop()
                return "TOO SLOW: its compiler took more time or memory than it may"
            return found

    def close(self) -> None:
        with self._turn:
            self._stop()

    def _start(self) -> None:
        self._stop()
        ours, theirs = socket.socketpair()
        with theirs:
            script = str(Path(grammar_worker.__file__))
            self._process = subprocess.Popen(
                [sys.executable, "-I", script, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath},
            )
        self._connection = Connection(ours.detach())
        if self._ask(self._about, _START_SECONDS) is None:
            self._stop()
            raise UserError("the process that tries grammars did not start; see that llguidance is installed soundly.")

    def _ask(self, message: dict[str, Any], seconds: float) -> str | None:
        """The answer's error; None where there is none in time."""
        assert self._connection is not None
        try:
            self._connection.send_bytes(json.dumps(message).encode())
            if not self._connection.poll(seconds):
                return None
            return str(json.loads(self._connection.recv_bytes())["error"])
        except (EOFError, OSError):
            return None

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None


def _written(tokenizer: Any) -> str:
    """The tokenizer as llguidance reads it: tokenizer.json with all added tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError("no grammar can be followed with this tokenizer: it is not one of the tokenizers library.")
    written = json.loads(backend.to_str())
    written["truncation"] = written["padding"] = None
    return json.dumps(written, ensure_ascii=False)


def _source(structure: Structure) -> str:
    """A structure as llguidance reads it."""
    from llguidance import LLMatcher

    options: dict[str, Any] = {"whitespace_flexible": False}
    if structure.whitespace == "pretty":
        options = {"whitespace_flexible": True, "whitespace_pattern": _PRETTY}
    try:
        match structure.kind:
            case "json_schema":
                schema = json.loads(structure.text)
                # The compiler takes options only beside a schema that is an object.
                schema = {"allOf": [schema]} if isinstance(schema, bool) else schema
                return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=options)  # type: ignore[arg-type]
            case "regex":
                return LLMatcher.grammar_from_regex(structure.text)
            case "choice":
                texts = dict.fromkeys(json.loads(structure.text))
                return LLMatcher.grammar_from_regex("|".join(map(_literal, texts)))
            case "lark":
                return LLMatcher.grammar_from_lark(structure.text)
    except ValueError as error:
        raise _refusal(structure, str(error)) from error


def _literal(text: str) -> str:
    """A regular expression that matches the text alone."""
    return "".join("\\" + letter if letter in _META else letter for letter in text)


def _refusal(structure: Structure, error: str) -> UserError:
    """What to raise for what the compiler says of a structure, with the keyword's name where it leaves that out."""
    why = _first_line(error)
    if structure.kind == "json_schema":
        for sign, keywords in _NAMES:
            if sign in why:
                named = [word for word in keywords if f'"{word}"' in structure.text]
                # What it advises is for who calls the compiler, not for who writes the schema.
                why = f"{', '.join(named) or keywords[0]}: {why.partition(' Enable ')[0].rstrip('.')}"
                break
    return UserError(f"the {structure.kind} cannot be enforced: {why}; change that part of it.")


# What the compiler says of a schema, and the keywords that it means.
_NAMES = (
    ("min/maxProperties", ("minProperties", "maxProperties")),
    ("patternProperty", ("patternProperties",)),
    ("regex", ("pattern", "patternProperties")),
    ("NoExtension", ("$ref",)),
    ("oneOf constraints", ("oneOf",)),
)


def _first_line(text: str) -> str:
    return " ".join(text.strip().splitlines()[0].split())[:200] if text.strip() else "no reason given"
