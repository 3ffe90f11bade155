"""`specpress chat`: turns from a pipe and from a terminal, templates, interruptions."""

import json
import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from compress.model.source import default_pair
from runtime import Speculator, load
from runtime.errors import UserError
from runtime.sampling.conversation import Conversation
from tests.conftest import write_tiny
from tests.killing import hear_interrupts

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def target() -> Path:
    return default_pair()[0]


@pytest.fixture(scope="module")
def with_template(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(target, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def answers(text: str, folder: Path, specpress: Callable[..., Any], *options: str) -> str:
    done = specpress(
        *("chat", folder, "--temperature", "0", "--max-new-tokens", "12", "--threads", "1", *options), input=text
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_continues_text_without_a_template(target: Path, specpress: Callable[..., Any]) -> None:
    found = answers("def add(a, b):\n", target, specpress)
    model = load(target, threads=1)
    expected = Speculator(model).generate(["def add(a, b):"], max_new_tokens=12)[0].text
    assert found == expected + "\n"
    # The second turn goes on from the first one and its answer; a reset forgets both.
    twice = answers("def add(a, b):\nx = 1\n", target, specpress)
    second = Speculator(model).generate([f"def add(a, b):{expected}\nx = 1"], max_new_tokens=12)[0].text
    assert twice == f"{expected}\n{second}\n"
    assert answers("x = 1\n/reset\ndef add(a, b):\n", target, specpress).endswith(f"\n{expected}\n")


def test_writes_the_conversation_by_the_template(with_template: Path, specpress: Callable[..., Any]) -> None:
    model = load(with_template, threads=1)
    conversation = Conversation(model.tokenizer, "be brief")
    tokens = conversation.ask("hello")
    assert model.tokenizer.decode(tokens) == "<system>be brief\n<user>hello\n<a>"
    conversation.messages.append({"role": "assistant", "content": "hi"})
    assert model.tokenizer.decode(conversation.ask("more")).endswith("<assistant>hi\n<user>more\n<a>")
    conversation.messages.pop()
    assert len(conversation.messages) == 2
    expected = Speculator(model).generate([tokens], max_new_tokens=12)[0].text
    assert answers("hello\n", with_template, specpress, "--system", "be brief") == expected + "\n"


def test_a_single_question_by_the_template(target: Path, with_template: Path, specpress: Callable[..., Any]) -> None:
    asked = ("--prompt", "x = 1", "--chat", "--quiet", "--max-new-tokens", "12", "--threads", "1")
    done = specpress("generate", "--target", with_template, *asked)
    assert done.returncode == 0 and done.stdout + "\n" == answers("x = 1\n", with_template, specpress), done.stderr
    refused = specpress("generate", "--target", target, *asked)
    assert refused.returncode == 2 and "chat template" in refused.stderr and "--chat" in refused.stderr


def test_an_answer_ends_with_the_tokens_of_generation_config(
    with_template: Path, tmp_path: Path, specpress: Callable[..., Any]
) -> None:
    """Those of the template's turns, which are not what ends a document; without the file it goes on."""
    folder = tmp_path / "model"
    shutil.copytree(with_template, folder)
    asked = ("--prompt", "x = 1", "--chat", "--quiet", "--max-new-tokens", "12", "--threads", "1", "--target", folder)
    model = load(folder, threads=1)
    prompt = Conversation(model.tokenizer).ask("x = 1")
    tokens = Speculator(model).generate([prompt], max_new_tokens=12)[0].tokens
    place = next(i for i in range(1, 12) if tokens[i] not in tokens[:i])
    before = specpress("generate", *asked).stdout
    ends = json.dumps({"eos_token_id": [*load(folder).end_tokens, tokens[place]]})
    (folder / "generation_config.json").write_text(ends)
    after = specpress("generate", *asked).stdout
    assert after == model.tokenizer.decode(tokens[:place]) and before.startswith(after) and before != after


def test_what_a_model_thinks_is_shown(tmp_path: Path, specpress: Callable[..., Any]) -> None:
    """Its marks are tokens of the vocabulary, not ones that only steer; a template may open the first itself."""
    folder = write_tiny("llama", tmp_path / "model", vocab_size=322)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE.replace("<a>", "<a><think>")
    tokenizer.save_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids("</think>") == 321
    asked = ("generate", "--target", folder, "--prompt", "x", "--chat", "--quiet", "--threads", "1")
    done = specpress(*asked, "--max-new-tokens", "2", "--logit-bias", "321:100")
    assert done.returncode == 0 and done.stdout == "</think></think>", done.stderr


def test_mistakes_are_one_sentence(target: Path, specpress: Callable[..., Any]) -> None:
    done = specpress("chat", target, "--system", "be brief", input="x\n")
    assert done.returncode == 2 and "chat template" in done.stderr and len(done.stderr.splitlines()) == 1
    done = specpress("chat", target, "--context", "64", input="word " * 200 + "\n")
    assert done.returncode == 2 and "start again" in done.stderr
    assert specpress("chat", "nowhere", input="x\n").returncode == 2


@pytest.mark.parametrize("template", ["{% for i in range(9999) %}" * 4 + "{% endfor %}" * 4, "{{ 9 ** (9 ** 9) }}"])
def test_a_template_without_end_is_ended(target: Path, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr("runtime.sampling.conversation.LONGEST", 0.3)
    tokenizer = load(target, threads=1).tokenizer
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"template: it had not ended after 0\.3 s"):
        Conversation(tokenizer).ask("hello")
    # The clock is off again.
    tokenizer.chat_template = TEMPLATE
    assert Conversation(tokenizer).ask("hello")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *words: str):
        pid, self.file = pty.fork()
        if pid == 0:
            os.environ["TERM"] = "dumb"
            hear_interrupts()
            os.execv(sys.executable, [sys.executable, "-m", "specpress", "chat", *words])
        self.pid = pid
        self.shown = ""

    def until(self, pattern: str, seconds: float = 60) -> str:
        """What comes to match the pattern; what is read next begins behind it."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            ready, _, _ = select.select([self.file], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.shown!r}"
            self.shown += os.read(self.file, 65536).decode(errors="replace")
        self.shown = self.shown[found.end() :]
        return found.group()

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def interrupt(self, pattern: str) -> str:
        """Ctrl-C until the pattern comes: Python misses one between readline's prompt and its wait for keys."""
        for _ in range(10):
            self.type("\x03")
            try:
                return self.until(pattern, 6)
            except AssertionError:
                continue
        return self.until(pattern, 0)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def start(*words: str) -> Terminal:
        made.append(Terminal(*words))
        return made[-1]

    yield start
    for one in made:
        try:
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(one.file)


PROMPT = r"\n> "
STATISTICS = r"\[(\d+) tokens, [\d.]+ tokens/s[^\]]*\]"


def test_in_a_terminal(target: Path, terminal: Callable[..., Terminal]) -> None:
    # Plain torch, so that the answer takes seconds and Ctrl-C falls into it.
    slowly = ("--kernels", "reference", "--drafter", "none", "--threads", "1")
    chat = terminal(str(target), "--max-new-tokens", "900", "--temperature", "1", *slowly)
    chat.until("no chat template")
    chat.until(PROMPT)
    chat.type("def add(a, b):\n")
    chat.until(r"\w+\W+\w+\W+\w+\W+\w+\W+\w+")
    statistics = chat.interrupt(STATISTICS)
    assert int(statistics[1:].split()[0]) < 900
    chat.until(PROMPT)
    chat.interrupt("/reset starts again")
    chat.until(PROMPT)
    chat.type("/what\n")
    chat.until("/reset starts again")
    chat.until(PROMPT)
    chat.type("\x04")
    _, status = os.waitpid(chat.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_second_turn_reads_only_what_is_new(target: Path, terminal: Callable[..., Terminal]) -> None:
    chat = terminal(str(target), "--max-new-tokens", "100", "--temperature", "0", "--threads", "1")
    for turn in range(2):
        chat.until(PROMPT)
        chat.type("class Counter:\n")
        assert ("from the cache" in chat.until(STATISTICS)) == (turn > 0)


def test_speed_sums_up_the_answers(target: Path, terminal: Callable[..., Terminal]) -> None:
    chat = terminal("--target", str(target), "--max-new-tokens", "20", "--temperature", "0", "--threads", "1")
    for _ in range(2):
        chat.until(PROMPT)
        chat.type("class Counter:\n")
        chat.until(STATISTICS)
    chat.until(PROMPT)
    chat.type("/speed\n")
    found = chat.until(
        r"\[\d+ tokens in 2 answers, acceptance rate α [\d.-]+, τ tokens a round [\d.]+, tokens/s [\d.]+\]"
    )
    assert 2 <= int(found[1:].split()[0]) <= 40


def test_too_long_a_conversation_can_go_on(target: Path, terminal: Callable[..., Terminal]) -> None:
    chat = terminal(str(target), "--context", "64", "--threads", "1", "--max-new-tokens", "4")
    chat.until(PROMPT)
    chat.type("word " * 100 + "\n")
    chat.until(r"64 have room.*\(/reset starts again\)")
    chat.until(PROMPT)
    chat.type("x = 1\n")
    chat.until(STATISTICS)
