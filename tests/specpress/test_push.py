"""Uploads, with huggingface_hub talking to a server on the loopback that plays the hub's endpoints."""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

_spec = importlib.util.spec_from_file_location("hub_server", Path(__file__).with_name("hub_server.py"))
assert _spec is not None and _spec.loader is not None
hub_server = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hub_server)


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Starts a hub."""
    servers = []

    def start(refuse: int | None = None) -> Any:
        server = hub_server.HubServer(refuse)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def surroundings(tmp_path: Path) -> dict[str, str]:
    """No token of the machine's user, and uploads as plain HTTP."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    return {**kept, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.fixture
def specpress() -> Callable[..., Any]:
    """The command, which imports huggingface_hub itself: it reads its settings then."""

    def run(*words: str | Path, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "specpress", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)

    return run


def expected(run: Path) -> set[str]:
    names = {p.relative_to(run / "model").as_posix() for p in (run / "model").rglob("*") if p.is_file()}
    names |= {f"draft/{p.name}" for p in (run / "draft").iterdir()}
    return names | {"README.md", "report.html", "report.md", "report.json", "recipe.yaml", "manifest.json"}


def test_uploads_model_draft_report_and_card(
    run_folder: Path, serve: Callable[..., Any], surroundings: dict[str, str], specpress: Callable[..., Any]
) -> None:
    hub = serve()
    done = specpress(
        *("push", run_folder, "someone/pair-int4", "--token", "hf_x", "--private", "--base-model", "org/base"),
        *("--license", "apache-2.0"),
        env={**surroundings, "HF_ENDPOINT": hub.address},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{hub.address}/someone/pair-int4"
    assert hub.tokens - {None} == {"Bearer hf_x"}
    asked = hub.created[0]  # older versions of huggingface_hub say private, newer ones visibility
    assert asked.get("private") is True or asked.get("visibility") == "private"
    assert hub.commits == ["Upload a Specpress run"]
    assert set(hub.files) == expected(run_folder)
    for name in ("model.safetensors", "config.json"):
        assert hub.files[name] == (run_folder / "model" / name).read_bytes()
    assert hub.files["draft/model.safetensors"] == (run_folder / "draft/model.safetensors").read_bytes()
    card = hub.files["README.md"].decode()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata == {
        "base_model": "org/base",
        "base_model_relation": "quantized",
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["specpress", "int4-rtn", "compressed-tensors", "speculative-decoding"],
    }
    for part in ('from_pretrained("someone/pair-int4")', "specpress generate", "| tokens/s |", "bits per quantised"):
        assert part in card


def test_dry_run_sends_nothing(
    run_folder: Path, serve: Callable[..., Any], surroundings: dict[str, str], specpress: Callable[..., Any]
) -> None:
    hub = serve()
    done = specpress("push", run_folder, "a/b", "--dry-run", env={**surroundings, "HF_ENDPOINT": hub.address})
    assert done.returncode == 0, done.stderr
    assert not hub.asked
    listed = {line.split()[1] for line in done.stdout.split("\n\n")[0].splitlines()}
    assert listed == expected(run_folder)
    assert "library_name: transformers" in done.stdout and "base_model" not in done.stdout


def test_mistakes_are_one_sentence(
    run_folder: Path,
    tmp_path: Path,
    serve: Callable[..., Any],
    surroundings: dict[str, str],
    specpress: Callable[..., Any],
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(run_folder, changed)
    (changed / "model/config.json").write_text("{}")
    hub = serve(refuse=403)
    mistakes = [
        ((tmp_path, "a/b"), "expected a run folder"),
        ((run_folder, "ab"), "found no owner"),
        ((run_folder, "a--b/c"), "expected OWNER/NAME"),
        ((changed, "a/b"), "has changed since the manifest was written"),
        ((run_folder, "a/b"), "no token of the hub was found"),
        ((run_folder, "a/b", "--token", "hf_x"), "cannot be uploaded"),
    ]
    for words, sentence in mistakes:
        done = specpress("push", *words, env={**surroundings, "HF_ENDPOINT": hub.address})
        assert (done.returncode, done.stdout) == (2, ""), done
        assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
        assert sentence in done.stderr
    done = specpress(
        "push", run_folder, "a/b", "--token", "x", env={**surroundings, "HF_ENDPOINT": "http://127.0.0.1:9"}
    )
    assert done.returncode == 2 and "cannot be uploaded" in done.stderr and len(done.stderr.splitlines()) == 1
