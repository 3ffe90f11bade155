"""The server's parts that need no server: the channel, texts, calls in texts, places, and names of targets."""

import asyncio
import random
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from runtime.errors import UserError
from runtime.sampling.stopping import StopStrings
from runtime.serve.admission import Admission
from runtime.serve.channel import Channel, Closed
from runtime.serve.chat_protocol import ChatRequest
from runtime.serve.command import ServeOptions, app, model_settings
from runtime.serve.errors import ApiError
from runtime.serve.flight import GAP, Bell
from runtime.serve.guard import Guard, is_loopback
from runtime.serve.openapi import described
from runtime.serve.settings import Access, Limits
from runtime.serve.texts import Text
from runtime.serve.tools import Calls, held


def test_messages_arrive_whole_and_in_order_and_nobody_waits_to_send() -> None:
    a, b = socket.socketpair()
    ours, theirs = Channel(a), Channel(b)
    generator = random.Random(0)
    sent = [("n", i, [generator.randrange(2**40)] * generator.randrange(3000), 0.1 * i, None) for i in range(400)]
    for message in sent:
        ours.send(message)  # far more than the socket takes: returns all the same
    assert ours.unsent
    found: list[Any] = []

    def read() -> None:
        while len(found) < len(sent):
            theirs.wait(1)
            found.extend(theirs.receive())

    reader = threading.Thread(target=read)
    reader.start()
    while ours.unsent:
        ours.wait(0.01)
        ours.flush()
    reader.join()
    assert found == sent
    ours.close()
    with pytest.raises(Closed):
        theirs.receive()


class Letters:
    """A vocabulary of one character a token."""

    class tokenizer:  # noqa: N801
        @staticmethod
        def decode(tokens: list[int], **_: Any) -> str:
            return "".join(map(chr, tokens))


def test_what_is_held_goes_out_with_the_next_message_or_a_flush() -> None:
    a, b = socket.socketpair()
    ours, theirs = Channel(a), Channel(b)
    ours.hold(("first", 1))
    assert theirs.receive() == [] and ours.unsent
    ours.send(("second", 2))
    assert theirs.receive() == [("first", 1), ("second", 2)] and not ours.unsent
    ours.hold(("third", 3))
    ours.flush()
    assert theirs.receive() == [("third", 3)]


def test_tokens_that_come_fast_are_told_of_together_and_an_end_at_once() -> None:
    async def told(rounds: int, pause: float) -> tuple[int, float]:
        bell, ended, wakes = Bell(), False, 0

        async def engine() -> None:
            nonlocal ended
            for _ in range(rounds):
                bell.tokens_came(time.monotonic())
                await asyncio.sleep(pause)
            ended = True
            bell.ring()

        began = time.monotonic()
        running = asyncio.create_task(engine())
        while not ended:
            await bell.heard()
            bell.told()
            wakes += 1
        await running
        return wakes, time.monotonic() - began

    fast, spent = asyncio.run(told(200, 0.0))
    assert fast <= 3 + spent / GAP and fast < 200
    slow, _ = asyncio.run(told(5, 2 * GAP))
    assert slow >= 5


@pytest.mark.parametrize("seed", range(20))
def test_a_text_is_the_same_in_whatever_pieces_it_comes(seed: int) -> None:
    generator = random.Random(seed)
    tokens = [generator.choice(b"abc") for _ in range(60)]
    strings = ["abca", "cc"]
    watch = StopStrings(
        strings, __import__("runtime.sampling.detokenize", fromlist=["x"]).Detokenizer(Letters.tokenizer, [])
    )
    kept = watch.add(tokens)
    tokens = tokens[:kept] if kept is not None else tokens
    plain = watch.release(last=True)
    for keep in (False, True):
        text, shown, left = Text(Letters, [], frozenset(), strings, 0, keep), "", list(tokens)  # type: ignore[arg-type]
        while left:
            count = generator.randrange(1, 5)
            part, left = left[:count], left[count:]
            shown += text.add(part, not left)
        ending = bytes(tokens).decode()[len(plain) :]
        assert shown == plain + (ending if keep and kept is not None else "")


def _said(calls: Calls, text: str, generator: random.Random) -> tuple[str, list[tuple[str, str]]]:
    content, made = "", {}
    left = text
    while True:
        count = generator.randrange(1, 9)
        part, left = left[:count], left[count:]
        for delta in calls.add(part, not left):
            content += delta.get("content", "")
            for one in delta.get("tool_calls", []):
                known = made.setdefault(one["index"], ["", ""])
                known[0] += one["function"].get("name", "")
                known[1] += one["function"]["arguments"]
        if not left:
            return content, [(name, arguments) for name, arguments in made.values()]


@pytest.mark.parametrize("seed", range(10))
def test_calls_are_found_in_whatever_pieces_they_come(seed: int) -> None:
    generator = random.Random(seed)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert _said(Calls(None), f"Hm < so <tool{call}\n{call}", generator) == (
        "Hm < so <tool", [("f", '{"a": 1}'), ("f", '{"a": 1}')],
    )  # fmt: skip
    assert _said(Calls(None), "no call <tool_c", generator) == ("no call <tool_c", [])
    broken = "<tool_call>{}</tool_call>"
    assert _said(Calls(None), broken, generator) == (broken, [])
    assert _said(Calls(""), '{"name":"f","arguments":{"a":{"b":"}"}}}', generator) == ("", [("f", '{"a":{"b":"}"}}')])
    assert _said(Calls("g"), '{"a":1}', generator) == ("", [("g", '{"a":1}')])


def _held(parameters: list[Any], template: str = "as <tool_call>", special: tuple[str, ...] = (), **more: Any) -> str:
    """The grammar of calls to functions with these parameters; empty where there is none."""
    strict = {"strict": True} if more.pop("strict", False) else {}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": one} | strict}
        for i, one in enumerate(parameters)
    ]
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": tools, **more}
    vocabulary: Any = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template), special=special)
    found = held(ChatRequest.model_validate(asked), vocabulary)
    return "" if found is None else found[1]


def test_calls_are_held_where_the_template_writes_them_and_arguments_as_far_as_can_be() -> None:
    plain = {"type": "object", "properties": {"town": {"enum": ["x"]}}}
    assert '"town"' in _held([plain]) and '"town"' in _held([plain], response_format={"type": "text"})
    assert not _held([plain], "no tags") and not _held([plain], special=("<tool_call>",))
    assert not _held([plain], tool_choice="none") and not _held([plain], response_format={"type": "json_object"})
    odd = [plain, {"type": "object", "not": {}}, {"type": "object", "oneOf": [{"minProperties": 1}]}]
    assert _held(odd).count('"town"') == 1 and _held(odd).count('%json {"type": "object", "x-guidance"') == 2
    for more in ({"strict": True}, {"tool_choice": "required"}):
        with pytest.raises(ApiError, match="keyword not"):
            _held(odd, **more)
    many = [{"type": "object", "properties": {"town": {"enum": ["x" * 2000]}}}] * 100
    assert '"town"' not in _held(many) and _held(many).count("%json") == 100
    with pytest.raises(ApiError, match="tools: the lark takes"):
        _held(many, tool_choice="required")


def test_places_are_counted_and_given_back() -> None:
    places = Admission(Limits(max_queued=2, max_queued_tokens=100), running=2)
    places.reserve(3)
    with pytest.raises(ApiError) as caught:
        places.reserve(2)
    assert caught.value.status == 429 and int(caught.value.headers["Retry-After"]) >= 1
    places.reserve(1)
    places.release(4)
    places.reserve(16)  # more than there are, but alone
    places.queue(60)
    with pytest.raises(ApiError):
        places.queue(60)
    places.unqueue(60)
    places.queue(60)


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True), ("LOCALHOST:8000", True), ("127.0.0.1:1", True), ("[::1]:8000", True), ("10.1.2.3", True),
        ("own.example:80", True), ("evil.example", False), ("localhost.evil.example", False), ("", False),
        ("[::1", False),
    ],
)  # fmt: skip
def test_hosts(host: str, known: bool) -> None:
    async def nothing(*_: Any) -> None:
        return None

    assert Guard(nothing, Access(hosts=("own.example",)))._known_host(host) is known


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "example")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_targets_are_named_by_their_folders() -> None:
    told = ["runs/int4", "runs/nf4/model", "other=runs/x", "user/name"]
    found = model_settings(ServeOptions(target=told, drafter="none", draft="runs/d"))
    assert [(one.name, one.path) for one in found] == [
        ("int4", "runs/int4"), ("nf4", "runs/nf4/model"), ("other", "runs/x"), ("name", "user/name"),
    ]  # fmt: skip
    assert [one.draft for one in found] == ["runs/d", None, None, None]
    assert model_settings(ServeOptions(targets=told[:3], target=told[3:], drafter="none", draft="runs/d")) == found


def test_no_target_is_a_mistake() -> None:
    with pytest.raises(UserError, match="name a model to serve: a run folder"):
        model_settings(ServeOptions())


def test_targets_are_said_as_arguments_or_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As for chat and export; both may be mixed."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    served: list[list[str]] = []
    monkeypatch.setattr("runtime.serve.server.run", lambda settings, *_: served.append([one.path for one in settings]))
    for words in (["a", "x=b"], ["--target", "a", "--target", "x=b"], ["a", "--target", "x=b"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert served == [["a", "b"]] * 3
    told = CliRunner().invoke(app, [])
    assert told.exit_code == 2 and "name a model to serve" in told.output and len(served) == 3


def test_the_description_is_whole() -> None:
    found = described("1")
    refs = {part.split('"')[0] for part in __import__("json").dumps(found).split("#/components/schemas/")[1:]}
    assert refs <= set(found["components"]["schemas"]) and len(found["paths"]) > 12
