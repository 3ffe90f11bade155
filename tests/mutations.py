"""Files with something wrong in them, by chance and repeatably, and the command `specpress` run on them in process."""

import faulthandler
import json
import random
from collections.abc import Sequence
from typing import Any

from typer.testing import CliRunner, Result

from specpress.cli import app

# Seconds after which a command counts as one that hangs: the process then ends, and says where it was.
LIMIT = 120
NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 7, 8, 64, 1000, 2**31, 2**63, 10**12, 10**30),
    *(0.0, 0.25, 0.5, 1.0, 1.5, -1.0, 64.0, 1e15, 1e308, float("nan"), float("inf")),
)
WORDS = ("", "x", "2", "bogus", "../x", "/dev/null", "int4", "float16", "a" * 300, "\0", "\ud800", "é\u202e", "<end>")
_LISTS: tuple[Any, ...] = ([], {}, ["x"], [[]], [1, 2], [None], {"x": 1}, {"type": "x"})
JUNK: tuple[Any, ...] = (None, True, False, *NUMBERS, *WORDS, *_LISTS)
_BYTES = (
    *(b"", b"{", b"[]", b"null", b"1" * 5000, b"[" * 100_000, b'{"a":' * 5000),
    *(b"\xff\xfe", b"\0" * 64, b'"\xed\xa0\x80"'),
)


def mutated_value(chance: random.Random, value: Any, junk: Sequence[Any] = JUNK) -> Any:
    """A copy of a JSON value in which one place, at any depth, is gone, repeated, or another value."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.2:
        return chance.choice(junk)
    if isinstance(value, dict):
        copy, key = dict(value), chance.choice(list(value))
        if (way := chance.random()) < 0.15:
            del copy[key]
        elif way < 0.2:
            copy[chance.choice([*WORDS, *map(str, value)])] = copy.pop(key)
        else:
            copy[key] = mutated_value(chance, copy[key], junk)
        return copy
    items, place = list(value), chance.randrange(len(value))
    if (way := chance.random()) < 0.15:
        del items[place]
    elif way < 0.25:
        items.insert(place, items[place])
    else:
        items[place] = mutated_value(chance, items[place], junk)
    return items


def mutated_bytes(chance: random.Random, data: bytes) -> bytes:
    """The file cut, with bytes changed or put in, or something else altogether."""
    if not data or (way := chance.randrange(5)) == 0:
        return chance.choice([*_BYTES, chance.randbytes(200)])
    if way == 1:
        return data[: chance.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        place = chance.randrange(len(changed))
        if way == 2:
            changed[place] = chance.randrange(256)
        elif way == 3:
            changed[place:place] = chance.choice(_BYTES[:4] + _BYTES[7:])
        else:
            del changed[place : place + chance.randrange(1, 20)]
            changed.append(0)
    return bytes(changed)


def mutated_json(chance: random.Random, data: bytes, junk: Sequence[Any] = JUNK) -> bytes:
    """A JSON file of other values, one to three of them, or (one in five) of other bytes."""
    if chance.random() < 0.2:
        return mutated_bytes(chance, data)
    value = json.loads(data)
    for _ in range(chance.choice([1, 1, 2, 3])):
        value = mutated_value(chance, value, junk)
    return json.dumps(value).encode()


def invoke(words: Sequence[str], typed: str | None = None) -> Result:
    """What `specpress WORDS` comes to; whatever is no exit goes through."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    try:
        found = CliRunner().invoke(app, list(words), input=typed)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def assert_sentence(found: Result) -> None:
    """That a command which was refused says why in one line, or in typer's few."""
    errors = [line for line in found.stderr.splitlines() if line.startswith(("error: ", "Error: ", "Error in"))]
    assert found.exit_code == 2 and "Traceback" not in found.output, found.output
    assert len(errors) == 1 or "Usage: " in found.output, found.output
