"""A server of its own process for tests, as `python -m runtime.serve` starts it, and raw requests to it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}tools: {{ tools | tojson }}, in <tool_call>\n{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
START = 120.0  # seconds


@dataclass
class Running:
    """A server that answers. `log` holds what it said on standard error."""

    process: "subprocess.Popen[str]"
    port: int
    log: Path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> "Answer":
        """One request on a connection of its own; `body` is sent as it is where it is bytes, otherwise as JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            told = {} if data is None else {"Content-Type": "application/json"}
            connection.request(method, path, data, told | (headers or {}))
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def post(self, path: str, /, **fields: Any) -> dict[str, Any]:
        """The answer to a request that must succeed."""
        answer = self.ask("POST", path, fields)
        assert answer.status == 200, answer.body
        return answer.json()

    def events(self, path: str, /, **fields: Any) -> list[dict[str, Any]]:
        """The events of a stream that must end as streams do."""
        answer = self.ask("POST", path, fields | {"stream": True})
        assert answer.status == 200, answer.body
        return parsed(answer.body)

    def engine(self) -> dict[str, Any]:
        """What /admin/models tells of the first model."""
        found: dict[str, Any] = self.ask("GET", "/admin/models").json()["models"][0]
        return found

    def wait_ready(self, seconds: float = START) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                if self.ask("GET", "/ready").status == 200:
                    return
            except OSError:
                pass
            assert time.monotonic() < end and self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def wait_models(self, count: int, seconds: float = START) -> None:
        """Until so many models are served: the server is ready when the first of them is."""
        end = time.monotonic() + seconds
        while len(self.ask("GET", "/v1/models").json()["data"]) < count:
            assert time.monotonic() < end and self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def wait_idle(self, seconds: float = 10.0) -> dict[str, Any]:
        """The engine's figures, once no text runs."""
        end = time.monotonic() + seconds
        while (found := self.engine())["running"] or found["waiting"]:
            assert time.monotonic() < end, found
            time.sleep(0.02)
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a figure's lines that have these labels."""
        total = 0.0
        for line in self.ask("GET", "/metrics").body.decode().splitlines():
            head, _, value = line.rpartition(" ")
            if head.split("{")[0] == name and all(f'{key}="{text}"' in head for key, text in labels.items()):
                total += float(value)
        return total


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def parsed(body: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream."""
    blocks = [block for block in body.decode().split("\n\n") if block and not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]", blocks[-1]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


@contextmanager
def running(folder: Path, targets: Sequence[str], *options: str, template: bool = True) -> Iterator[Running]:
    """A server on a free port, ready; its processes are gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    told = [part for target in targets for part in ("--target", target)]
    if template:
        (folder / "template.jinja").write_text(TEMPLATE)
        told += ["--chat-template", str(folder / "template.jinja")]
    log = folder / "server.log"
    command = [sys.executable, "-m", "runtime.serve", *told, "--port", "0", *options]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready: "), log.read_text()
        yield Running(process, int(line.rsplit(":", 1)[1]), log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
