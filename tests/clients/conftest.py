"""A server of the project's own environment, for the clients of `.clients`; without that these tests are left out."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# `make clients` has them all; elsewhere nothing here is collected.
if any(find_spec(name) is None for name in ("openai", "langchain_openai", "lm_eval", "guidellm")):
    collect_ignore_glob = ["test_*.py"]


PYTHON = ROOT / ".venv/bin/python"
PAIR = ROOT / "examples/pair"


@contextmanager
def _serving(folder: Path, *options: str) -> Iterator[str]:
    """The address of a server of the embedded pair's target, called `pair`."""
    (folder / "template.jinja").write_text(TEMPLATE)
    command = [str(PYTHON), "-m", "runtime.serve", "--target", f"pair={PAIR / 'target'}", "--port", "0", *options]
    command += ["--chat-template", str(folder / "template.jinja")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready: "), (folder / "log").read_text()
        yield line.removeprefix("ready: ").strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that drafts, with the pair's draft."""
    options = ("--draft", str(PAIR / "draft"), "--drafter", "lookup+model")
    with _serving(tmp_path_factory.mktemp("server"), *options) as found:
        yield found


@pytest.fixture(scope="session")
def plain_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that does not draft."""
    with _serving(tmp_path_factory.mktemp("plain"), "--drafter", "none") as found:
        yield found


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched from anywhere."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    assert os.environ.get("OPENAI_API_KEY") and sys.version_info >= (3, 11)
