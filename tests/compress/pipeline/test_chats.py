"""Conversations as the text to calibrate and measure on: written by the target's template, both roles of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from calib import corpora
from compress.context import RunContext
from compress.errors import USER_ERRORS
from compress.model.source import default_pair
from compress.pipeline.inputs import open_inputs
from compress.recipe import Recipe
from compress.run import app

TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}<{{ m.role }}>{% if m.thinking %}[{{ m.thinking }}]{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"How is {number} + {number} written in Python? " * 2},
            {"role": "assistant", "thinking": f"twice {number}", "content": f"print({number} + {number})\n" * 3},
        ]
    }
    for number in range(3, 43)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "instruct"
    shutil.copytree(default_pair()[0], folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def written(rows: list[Any], folder: Path) -> str:
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "chats.jsonl")


def inputs(model: Path, calib: str) -> Any:
    options: dict[str, Any] = {"speed": False, "samples": 4, "seq_len": 64, "eval_tokens": 256}
    return open_inputs(RunContext.of(Recipe.load("int4-gptq"), model=str(model), calib=calib, **options))


def test_both_roles_are_calibrated_and_measured_on_as_the_template_writes_them(model: Path, tmp_path: Path) -> None:
    found = inputs(model, written(CHATS, tmp_path))
    windows = found.text.windows
    assert windows.calibration.shape == (4, 64) and len(windows.evaluation) == 4
    for part in (windows.calibration, windows.evaluation):
        text = "".join(found.target.tokenizer.batch_decode(part))
        assert "<user>" in text and "<assistant>[twice" in text and "print(" in text
    first, messages = found.text.corpus.documents[0], CHATS[0]["messages"]
    assert first == f"<user>{messages[0]['content']}\n<assistant>[twice 3]{messages[1]['content']}\n"
    assert not found.text.corpus.are_chats and found.text.corpus.name == "chats.jsonl"


def test_a_model_without_a_template_cannot_read_conversations(tmp_path: Path) -> None:
    with pytest.raises(USER_ERRORS, match=r"chats.jsonl holds conversations, and the tokenizer of target has no chat"):
        inputs(default_pair()[0], written(CHATS, tmp_path))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": []}, r"line 2: expected a list of messages in 'messages', found \[\]"),
        ({"messages": "hello"}, r"line 2: expected a list of messages in 'messages', found 'hello'"),
        ({"messages": ["hello"]}, "line 2, message 1: expected an object with role and content, found 'hello'"),
        ({"messages": [{"content": "hello"}]}, "line 2, message 1: expected a role such as user, found None"),
        ({"messages": [{"role": "user"}]}, "line 2, message 1: expected a text in content, found None"),
        ({"messages": [{"role": "user", "content": 7}]}, "line 2, message 1: expected a text in content, found 7"),
        ({"text": "def f(): pass"}, "chats.jsonl: 1 of 2 rows are conversations"),
    ],
)
def test_a_malformed_message_is_named(row: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(USER_ERRORS, match=told):
        corpora.load(written([CHATS[0], row], tmp_path), chats=True)


def test_a_template_that_cannot_write_a_conversation_is_one_sentence(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "instruct"
    shutil.copytree(model, other)
    (other / "chat_template.jinja").write_text("{{ raise_exception('roles must take turns') }}")
    command = ["--recipe", "nf4", "--model", str(other), "--calib", written(CHATS, tmp_path), "--no-speed"]
    told = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "run")])
    assert told.exit_code == 2 and "roles must take turns" in told.output and "Traceback" not in told.output
    assert told.output.count("error:") == 1 and not (tmp_path / "run").exists()


def test_conversations_are_no_text_where_no_template_writes_them(tmp_path: Path) -> None:
    with pytest.raises(USER_ERRORS, match=r"chats.jsonl holds conversations .* name a source of plain text"):
        corpora.load(written(CHATS, tmp_path))
