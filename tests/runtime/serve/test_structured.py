"""Forms over HTTP: schemas, expressions, choices and grammars hold, or are refused by name; and calls of tools."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.serving import Running

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"enum": ["Berlin", "Paris"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}
MESSAGES = [{"role": "user", "content": "A pet, please"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}


def test_a_schema_holds_whoever_drafts(server: Running) -> None:
    texts = {
        server.post(
            "/v1/chat/completions", messages=MESSAGES, max_tokens=80, temperature=1, seed=6, response_format=FORMAT,
            specpress={"drafter": drafter},
        )["choices"][0]["message"]["content"]
        for drafter in ("none", "grammar", "lookup")
    }  # fmt: skip
    assert len(texts) == 1
    jsonschema.validate(json.loads(texts.pop()), SCHEMA)


def test_forced_tokens_are_drafted(server: Running) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 80, "temperature": 0, "response_format": FORMAT}
    answer = server.post("/v1/chat/completions", **asked, specpress={"rounds": True})
    rounds = answer["choices"][0]["specpress"]["rounds"]
    forced = [token for one in rounds if one["drafter"] == "grammar" for token in one["drafted"]]
    assert sum(token["accepted"] for token in forced) > 5
    assert server.metric("specpress:grammar_forced_tokens_total") >= len(forced)


def test_vllms_structured_outputs(server: Running) -> None:
    for form, pattern in (
        ({"regex": "[a-c]{3,5}"}, "[a-c]{3,5}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "x" /[0-9]+/ "y"'}, "x[0-9]+y"),
    ):
        asked = {"prompt": "a", "max_tokens": 60, "temperature": 0, "structured_outputs": form}
        choice = server.post("/v1/completions", **asked)["choices"][0]
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["text"]), choice["text"]
    answer = server.post("/v1/completions", prompt="a", max_tokens=60, response_format={"type": "json_object"}, seed=1)
    assert answer["choices"][0]["text"].startswith("{")


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}}, "wrong"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "string"}}}}}, "not"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "regex"),
        ({"structured_outputs": {"grammar": "start: ("}}, ""),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"structured_outputs": {"regex": "a" * 20_000}}, "bytes"),
    ],
)
def test_what_a_grammar_cannot_hold_is_refused(server: Running, form: dict[str, Any], word: str) -> None:
    answer = server.ask("POST", "/v1/completions", {"prompt": "a", **form})
    assert answer.status == 400, answer.body
    assert word in answer.json()["error"]["message"]


def test_heavy_grammars_do_not_stop_other_streams(server: Running) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(120):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    heavy = [
        {"structured_outputs": {"regex": "(a|b|ab){1,400}c{1,300}(x{1,30}){1,30}"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": deep}}},
        {"structured_outputs": {"choice": [f"choice number {i}" for i in range(3000)]}},
    ]
    body = {"prompt": "import", "max_tokens": 600, "temperature": 0, "ignore_eos": True}

    def ask(form: dict[str, Any]) -> int:
        return server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2, **form}).status

    with ThreadPoolExecutor(4) as pool:
        stream = pool.submit(server.post, "/v1/completions", **body)
        time.sleep(0.05)
        assert all(status in (200, 400) for status in pool.map(ask, heavy))
        assert stream.result()["usage"]["completion_tokens"] == 600


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_demanded_call_has_arguments_by_its_schema(server: Running, choice: Any) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": choice, "max_tokens": 60, "seed": 1}
    whole = server.post("/v1/chat/completions", **asked)["choices"][0]
    call = whole["message"]["tool_calls"][0]
    assert call["function"]["name"] == "weather" and whole["message"]["content"] is None
    jsonschema.validate(json.loads(call["function"]["arguments"]), TOOL["function"]["parameters"])
    assert whole["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    deltas = [event["choices"][0]["delta"] for event in server.events("/v1/chat/completions", **asked)]
    calls = [one for delta in deltas for one in delta.get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "weather" and calls[0]["id"].startswith("call_")
    assert "".join(one["function"]["arguments"] for one in calls) == call["function"]["arguments"]


def test_a_demanded_call_may_refer_to_its_own_definitions(server: Running) -> None:
    """As pydantic writes the schemas of functions."""
    parameters = {"$ref": "#/$defs/Trip", "$defs": {
        "Trip": {"type": "object", "properties": {"to": {"$ref": "#/$defs/Größe"}}, "required": ["to"],
                 "additionalProperties": False},
        "Größe": {"enum": ["S", "L"]}}}  # fmt: skip
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("go", "stay")]
    asked: dict[str, Any] = {"messages": MESSAGES, "tools": tools, "tool_choice": "required", "max_tokens": 60}
    for seed in range(3):
        call = server.post("/v1/chat/completions", **asked, seed=seed)["choices"][0]["message"]["tool_calls"][0]
        assert call["function"]["name"] in ("go", "stay")
        jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)


# What its schema does not allow: no such town, and too many days.
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome", "days": 30}}\n</tool_call>'


def test_a_call_that_the_model_chose_to_make_has_arguments_by_its_schema(server: Running) -> None:
    """The pair repeats what stands there often, so it begins calls; it would end them with what the schema forbids."""
    turn = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": CALL}]
    calls = 0
    for seed in range(6):
        asked: dict[str, Any] = {"messages": [*turn * 5, turn[0]], "tools": [TOOL], "seed": seed}
        asked |= {"max_tokens": 80, "temperature": 0.15 * seed}
        message, again = (
            server.post("/v1/chat/completions", **asked, specpress={"drafter": drafter})["choices"][0]["message"]
            for drafter in ("none", "lookup")
        )
        made = [call["function"] for call in message.get("tool_calls", [])]
        assert made == [call["function"] for call in again.get("tool_calls", [])]
        assert message["content"] == again["content"]
        for function in made:
            assert function["name"] == "weather"
            jsonschema.validate(json.loads(function["arguments"]), TOOL["function"]["parameters"])
        calls += len(made)
    assert calls > 2


def test_responses_call_functions_too(server: Running) -> None:
    function = TOOL["function"]
    tool = {"type": "function", "name": "weather", "parameters": function["parameters"]}
    asked: dict[str, Any] = {"input": "Weather?", "tools": [tool], "tool_choice": "required", "max_output_tokens": 60}
    item = server.post("/v1/responses", **asked, seed=2)["output"][0]
    assert item["type"] == "function_call" and item["name"] == "weather"
    jsonschema.validate(json.loads(item["arguments"]), function["parameters"])
    again = [
        {"role": "user", "content": "Weather?"},
        {"type": "function_call", "call_id": item["call_id"], "name": "weather", "arguments": item["arguments"]},
        {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"},
    ]
    assert server.post("/v1/responses", input=again, max_output_tokens=4)["output"][0]["type"] == "message"
    form = {"format": {"type": "json_schema", "name": "pet", "schema": SCHEMA}}
    text = server.post("/v1/responses", input="A pet", text=form, max_output_tokens=80, seed=3)
    jsonschema.validate(json.loads(text["output"][0]["content"][0]["text"]), SCHEMA)
