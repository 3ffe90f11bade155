"""Who may ask and how much: keys, hosts, full queues, clients that leave, readers that are slow; and /metrics' sums."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.serving import ROOT, Running, running

KEY, ADMIN = "a-key-of-ours", "another-for-admins"
LONG = {"prompt": "import", "max_tokens": 1000, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path]) -> Iterator[Running]:
    """A server with keys and room for two texts."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text(f"# ours\n{KEY}\nsecond-key\n")
    (folder / "admin").write_text(f"{ADMIN}\n")
    options = ["--api-key-file", str(folder / "keys"), "--admin-key-file", str(folder / "admin"), "--threads", "1"]
    options += ["--max-batch", "1", "--max-queued", "1", "--max-queued-tokens", "600", "--lenient"]
    with running(folder, [f"pair={pair[0]}"], *options, template=False) as found:
        yield found


def _auth(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_all_but_health_and_the_page_itself_needs_a_key(guarded: Running) -> None:
    for path in ("/health", "/", "/page/main.js"):
        assert guarded.ask("GET", path).status == 200
    assert guarded.ask("GET", "/run-report?name=a&ticket=b").status == 403
    assert guarded.ask("POST", "/compare", {"text": "a"}).status == guarded.ask("GET", "/runs").status == 401
    for path in ("/v1/models", "/metrics", "/ready", "/openapi.json", "/page-data"):
        assert guarded.ask("GET", path).status == 401
        assert guarded.ask("GET", path, headers=_auth("a-key-of-our")).status == 401
        assert guarded.ask("GET", path, headers={"Authorization": KEY}).status == 401
        assert guarded.ask("GET", path, headers=_auth(KEY)).status == 200
    assert guarded.ask("GET", "/v1/models", headers=_auth("second-key")).status == 200
    wrong = guarded.ask("POST", "/v1/completions", {"prompt": "a"})
    assert wrong.status == 401 and wrong.json()["error"]["code"] == "invalid_api_key"
    assert wrong.headers["www-authenticate"] == "Bearer"
    assert KEY not in guarded.log.read_text()


def test_administration_needs_its_own_key(guarded: Running) -> None:
    assert guarded.ask("GET", "/admin/models", headers=_auth(KEY)).status == 401
    assert guarded.ask("GET", "/admin/models", headers=_auth(ADMIN)).status == 200


def test_a_full_queue_answers_429_and_when_to_come_again(guarded: Running) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: guarded.ask("POST", "/v1/completions", LONG, _auth(KEY)), range(8)))
    statuses = sorted(answer.status for answer in answers)
    assert set(statuses) == {200, 429} and statuses.count(200) >= 2
    refused = next(answer for answer in answers if answer.status == 429)
    assert 1 <= int(refused.headers["retry-after"]) <= 120 and refused.json()["error"]["type"] == "rate_limit_error"
    metrics = guarded.ask("GET", "/metrics", headers=_auth(KEY)).body.decode()
    assert f'vllm:admission_rejections_total{{model_name="pair"}} {statuses.count(429)}.0' in metrics


def test_a_lenient_server_passes_over_what_it_does_not_know(guarded: Running) -> None:
    asked = {"prompt": "a", "max_tokens": 2, "foo": 1, "specpress": {"bar": 2, "drafter": "none"}}
    assert guarded.ask("POST", "/v1/completions", asked, _auth(KEY)).status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_text_whose_client_left_is_ended(server: Running, stream: bool) -> None:
    server.wait_idle()
    generated = server.metric("vllm:generation_tokens_total")
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    body = json.dumps(LONG | {"stream": stream, "n": 8}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        while server.metric("vllm:generation_tokens_total") == generated:
            time.sleep(0.002)
    server.wait_idle()
    assert server.metric("vllm:generation_tokens_total") < generated + 7800
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 8
    assert server.engine()["pages_used"] == 0


def test_a_slow_reader_holds_nobody_up_and_gets_the_whole_text(server: Running) -> None:
    whole = server.post("/v1/completions", **LONG)["choices"][0]["text"]
    body = json.dumps(LONG | {"stream": True}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        )
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        assert server.post("/v1/completions", prompt="a", max_tokens=4)["usage"]["completion_tokens"] == 4
        server.wait_idle(60)  # its text has been written, and waits for it
        got = b""
        while part := connection.recv(65536):
            got += part
    texts = [json.loads(line[6:]) for line in got.decode().split("\n") if line.startswith("data: {")]
    assert "".join(one["choices"][0]["text"] for one in texts) == whole


def test_sums_of_metrics_are_the_clients_counts(server: Running) -> None:
    server.wait_idle()
    names = ("prompt", "generation")
    before = {name: server.metric(f"vllm:{name}_tokens_total") for name in names}
    drafted = [server.metric(f"vllm:spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")]
    places = server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    ended = server.metric("vllm:request_success_total")
    ours: dict[str, Any] = {"rounds": True, "drafter": "lookup"}

    def ask(i: int) -> dict[str, Any]:
        asked: dict[str, Any] = {"prompt": ["for i in range(", "x"], "max_tokens": 40 + i, "seed": i, "specpress": ours}
        if i % 2:
            # What a form forces is drafted always; whether `lookup` drafts is for its controller to say.
            asked["structured_outputs"] = {"choice": ["the first long answer of two", "some other answer, as long"]}
        return server.post("/v1/completions", **asked)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(6)))
    usage = [answer["usage"] for answer in answers]
    rounds = [one for answer in answers for choice in answer["choices"] for one in choice["specpress"]["rounds"]]
    tokens = [token for one in rounds for token in one["drafted"]]
    assert server.metric("vllm:prompt_tokens_total") - before["prompt"] == sum(one["prompt_tokens"] for one in usage)
    new = sum(one["completion_tokens"] for one in usage)
    assert server.metric("vllm:generation_tokens_total") - before["generation"] == new
    assert server.metric("vllm:request_success_total") - ended == 12
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") - drafted[0] == len(tokens) > 0
    accepted = sum(token["accepted"] for token in tokens)
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") - drafted[1] == accepted > 0
    assert server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total") - places == accepted


def test_a_model_is_loaded_beside_and_over_another_and_let_go(server: Running, pair: tuple[Path, Path]) -> None:
    texts: list[Any] = []
    stream = threading.Thread(target=lambda: texts.append(server.post("/v1/completions", **(LONG | {"model": "pair"}))))
    stream.start()
    failed = server.ask("POST", "/admin/models/load", {"name": "pair", "path": str(ROOT / "docs")})
    assert failed.status == 400 and failed.json()["error"]["code"] == "load_failed"
    assert server.post("/admin/models/load", name="second", path=str(pair[1]))["id"] == "second"
    stream.join()
    assert texts[0]["usage"]["completion_tokens"] == 1000
    assert [one["id"] for one in server.ask("GET", "/v1/models").json()["data"]] == ["pair", "second"]
    assert server.post("/v1/completions", model="second", prompt="a", max_tokens=3)["model"] == "second"
    assert server.post("/admin/models/unload", name="second")["unloaded"] is True
    assert server.ask("POST", "/v1/completions", {"model": "second", "prompt": "a"}).status == 404


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--api-key-file", "missing"], "--api-key-file: missing"),
        (["--chat-template", "missing"], "--chat-template: missing"),
        (["--target", "docs"], "docs"),
    ],
)
def test_a_server_that_cannot_start_says_why(options: list[str], part: str, pair: tuple[Path, Path]) -> None:
    done = warm.run("runtime.serve", "--target", f"pair={pair[0]}", "--port", 0, *options, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and part in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().split("\n")) == 1


def test_runtime_imports_no_package_of_the_server() -> None:
    code = (
        "import sys, runtime, runtime.serve.command; from runtime import Speculator;"
        "print([n for n in ('fastapi', 'starlette', 'uvicorn', 'prometheus_client', 'llguidance') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_a_server_starts_its_engine_before_it_imports_what_takes_seconds() -> None:
    """Both processes import torch and transformers, side by side: the server needs them for tokenizers alone."""
    code = (
        "import sys; from runtime.serve import server; heavy = ('torch', 'transformers');"
        "print([n for n in heavy if n in sys.modules]); import runtime.contract; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split("\n")[:2] == ["[]", "True"], done.stderr


def test_without_the_extra_one_sentence_says_how_to_get_it(pair: tuple[Path, Path]) -> None:
    code = (
        "import importlib.util as u; real = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'uvicorn' else real(name, *a);"
        f"from runtime.serve.command import app; app(['--target', {str(pair[0])!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "pip install 'specpress[serve]'" in done.stderr
