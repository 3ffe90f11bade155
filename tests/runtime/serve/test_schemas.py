"""Forms in numbers: random schemas, schemas that no grammar holds, and grammars that are heavy to follow. Slow."""

import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.random_schemas import UNHELD, random_schema
from tests.serving import Running

pytestmark = pytest.mark.slow
SCHEMAS, SEEDS = 300, 3
CLIENTS = 8
# Seconds that other streams may wait. On a quiet machine it is below 0.3; here other things may run.
LONGEST_GAP = 1.5


def _asked(schema: Any, seed: int, drafter: str | None, chat: bool) -> tuple[str, dict[str, Any]]:
    """As OpenAI's users ask for a form: greedy for the first seed, then sampled."""
    form = {"name": "answer", "strict": True, "schema": schema}
    asked: dict[str, Any] = {"model": "pair", "response_format": {"type": "json_schema", "json_schema": form}}
    asked |= {"max_tokens": 200, "seed": seed, "temperature": 0.7 * seed, "return_token_ids": True}
    asked |= {"specpress": {"drafter": drafter}} if drafter else {}
    if chat:
        return "/v1/chat/completions", asked | {"messages": [{"role": "user", "content": "Fill in the form."}]}
    return "/v1/completions", asked | {"prompt": "data = "}


def _written(server: Running, schema: Any, seed: int, drafter: str | None, chat: bool) -> tuple[str, list[int], str]:
    path, asked = _asked(schema, seed, drafter, chat)
    choice = server.post(path, **asked)["choices"][0]
    return choice["message"]["content"] if chat else choice["text"], choice["token_ids"], choice["finish_reason"]


def test_texts_of_random_schemas_validate_and_speculation_changes_nothing(server: Running) -> None:
    """What is not held is refused by a keyword's name; of the others every text that ended by itself validates."""

    def texts(number: int) -> int | None:
        """How many ended by themselves; None where the schema was refused."""
        schema = random_schema(number)
        chat = number % 2 == 0
        path, asked = _asked(schema, 0, "none", chat)
        if (refused := server.ask("POST", path, asked | {"max_tokens": 1})).status != 200:
            message = refused.json()["error"]["message"]
            assert refused.status == 400 and any(f"{key}:" in message for key in _keywords(schema)), (schema, message)
            return None
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        ended = 0
        for seed in range(SEEDS):
            plain = _written(server, schema, seed, "none", chat)
            assert _written(server, schema, seed, None, chat) == plain, (number, seed)
            if plain[2] == "stop":
                wrong = [error.message for error in validator.iter_errors(json.loads(plain[0]))]
                assert not wrong, (number, seed, plain[0], wrong, schema)
                ended += 1
        return ended

    held: list[int] = []
    refused = 0
    with ThreadPoolExecutor(CLIENTS) as pool:
        for first in itertools.count(0, 50):
            found = list(pool.map(texts, range(first, first + min(50, SCHEMAS - len(held)))))
            held += [one for one in found if one is not None]
            refused += found.count(None)
            if len(held) == SCHEMAS:
                break
    print(f"{SCHEMAS} schemas, {SCHEMAS * SEEDS} texts, {sum(held)} ended by themselves, {refused} schemas refused")
    assert sum(held) > SCHEMAS * SEEDS / 2 and refused < SCHEMAS / 20


def _keywords(schema: Any) -> Iterator[str]:
    """All keys of a schema, and of what is in it."""
    if isinstance(schema, dict):
        yield from schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _keywords(inner)


def test_schemas_that_no_grammar_holds_are_refused_by_the_keywords_name(server: Running) -> None:
    told = 0
    for keyword, schema in UNHELD:
        inside = {"type": "object", "properties": {"list": {"type": "array", "items": schema}}, "required": ["list"]}
        behind = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}], "$defs": {"x": schema}}
        for place, whole in enumerate((schema, inside, behind)):
            answer = server.ask("POST", *_asked(whole, 0, None, place % 2 == 0))
            assert answer.status == 400, (keyword, whole, answer.body)
            error = answer.json()["error"]
            assert f"keyword {keyword} " in error["message"] or f"{keyword}:" in error["message"], (keyword, error)
            told += 1
    assert told >= 60


def _heavy() -> list[tuple[str, dict[str, Any]]]:
    """Forms that are heavy to look at, to compile or to follow."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    wide = {"type": "object", "properties": {f"field {i}": {"type": "string", "maxLength": 30} for i in range(4000)}}
    long = {"n" * 1_000_000: {"type": "object", "properties": {str(i): True for i in range(100_000)}}}
    regexes = [
        *("(a*)*b", "(x+x+)+y", "(a|a)*{1,40}", "(a|b|ab){1,400}c{1,300}(x{1,30}){1,30}", "((a{1,100}){1,100}){1,100}"),
        *("(.*a){60}", "[a-z]{1,15000}", "(.{0,200}x){20}", ".*.*.*.*.*=.*", r"(\w+\s?){1,500}", "(a?){500}a{500}"),
        *("(" * 5000 + "a" + ")" * 5000, "|".join(f"word{i}" for i in range(1500)), r"\p{L}{1,2000}", "a{1,65535}"),
    ]
    larks = [
        *("\n" * 1_000_000, "a[\n" * 300_000, "start: x\n" + "x: " * 300_000, 'start: "' + "y" * 1_000_000 + '"'),
        *("\n" * 60_000 + "start: /a/", "a[\n" * 20_000, "start: " + " | ".join(f'"{i}"' for i in range(6000))),
        *("start: x x\nx: y y | x x\ny: x | /a/ | y y", "start: " + "(" * 20_000, "start: a{0,60000}\na: /b/ | a a"),
    ]
    return [
        *((f"regex {one[:30]}", {"structured_outputs": {"regex": one}}) for one in regexes),
        *((f"lark {one[:20]!r} {len(one)}", {"structured_outputs": {"grammar": one}}) for one in larks),
        *(
            (f"schema {name}", {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
            for name, schema in (("deep", deep), ("wide", wide), ("long", {"properties": long}))
        ),
        ("choices", {"structured_outputs": {"choice": [f"choice number {i}" for i in range(5000)]}}),
        ("many choices", {"structured_outputs": {"choice": [f"choice number {i}" for i in range(50_000)]}}),
    ]


def test_heavy_forms_leave_other_streams_their_pace(server: Running) -> None:
    """One heavy form after the other, while four texts stream: none of these waits long for its next piece."""
    body: dict[str, Any] = {"prompt": "import", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}
    gaps: list[tuple[float, float]] = []
    over = threading.Event()

    def stream() -> None:
        from http.client import HTTPConnection

        while not over.is_set():
            connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer, last = connection.getresponse(), 0.0
            while answer.readline():
                now = time.monotonic()
                gaps.append((now - last if last else 0.0, now))
                last = now
            connection.close()

    streams = [threading.Thread(target=stream) for _ in range(4)]
    for one in streams:
        one.start()
    try:
        time.sleep(2)
        quiet = max(gap for gap, _ in gaps)
        worst: list[tuple[float, str, int]] = []
        for name, form in _heavy():
            began = time.monotonic()
            asked = {"prompt": "a", "max_tokens": 30, "temperature": 1, "seed": 1, **form}
            status = server.ask("POST", "/v1/completions", asked).status
            time.sleep(0.1)
            worst.append((max((gap for gap, at in gaps if at > began), default=0.0), name, status))
    finally:
        over.set()
        for one in streams:
            one.join()
    print(f"worst gap {max(worst)[0]:.3f} s, without heavy forms {quiet:.3f} s", *sorted(worst)[-8:], sep="\n")
    assert {status for _, _, status in worst} == {200, 400}
    assert max(worst)[0] < LONGEST_GAP
    assert server.engine()["restarts"] == 0
