"""`bench digest`: digests of logits on every path, beside what a run's manifest has."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from runtime import load, native
from runtime.bench import digest
from runtime.bench.__main__ import app

PATHS = [name for name in native.PATHS if native.usable(name)[0]]
pytestmark = pytest.mark.skipif(not PATHS, reason=native.usable("portable")[1])


@pytest.fixture
def run(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A run folder whose manifest has digests."""
    shutil.copytree(tiny("llama"), tmp_path / "run" / "model")
    write(tmp_path / "run", digest.entry(tmp_path / "run" / "model", 1))
    return tmp_path / "run"


def write(run: Path, entry: Any) -> None:
    (run / "manifest.json").write_text(json.dumps({"schema": 1, "files": {}, "logits": entry}))


def called(*words: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["digest", *map(str, words), "--threads", "1"])
    return done.exit_code, done.output


@pytest.mark.parametrize("kernels", ["reference", *PATHS])
def test_every_path_has_the_manifests(run: Path, kernels: str, tmp_path: Path) -> None:
    code, text = called("--target", run, "--kernels", kernels, "--json", tmp_path / "d.json")
    assert code == 0 and text.endswith("equal to the manifest's\n"), text
    told = json.loads((tmp_path / "d.json").read_text())
    assert told["sha256"] == told["manifest"] and told["kernels"] == kernels and not told["differs"]
    parts = [f"{kind} {part}" for kind in ("float32", "int8", "int4") for part in ("prefill", "decode", "tree")]
    assert list(told["sha256"]) == parts and len(set(told["sha256"].values())) == len(parts)
    assert all(re.fullmatch("[0-9a-f]{64}", text) for text in told["sha256"].values())


def test_a_changed_weight_is_told(run: Path) -> None:
    file = run / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] *= 1 + 2.0**-20
    save_file(tensors, file)
    code, text = called("--target", run / "model")
    assert code == 1 and "differs from the manifest's: float32 prefill, float32 decode" in text


def test_a_digest_that_is_missing_differs(run: Path) -> None:
    found = digest.digests(load(run, threads=1).decoder)
    assert digest.differing(found, found) == []
    assert digest.differing(found, {**found, "int2 tree": "0"}) == ["int2 tree"]


def test_models_without_a_manifest_and_manifests_without_digests(run: Path, tiny: Callable[..., Path]) -> None:
    assert "manifest" not in called("--target", tiny("llama"))[1]
    write(run, {"sha256": None, "why": "because"})
    code, text = called("--target", run)
    assert code == 0 and text.endswith("the manifest has none: because\n")
    write(run, None)
    assert "it was written before there were digests" in called("--target", run)[1]


def test_what_has_none_says_why(run: Path, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for options, words in (
        ({"kernels": "plain-torch"}, "'plain-torch' have bits of their own"),
        ({"adapter": True}, "transformers"),
    ):
        with pytest.raises(digest.NoDigestError, match=words):
            digest.digests(load(run, threads=1, **options).decoder)
    tensors = load_file(run / "model" / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, run / "model" / "model.safetensors")
    assert digest.entry(run / "model", 1) == {"sha256": None, "why": "logits hold NaN or Inf (float32 prefill)"}
    config = json.loads((run / "model" / "config.json").read_text())
    (run / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20}))
    assert digest.entry(run / "model", 1)["why"] == "the model takes no more than 20 tokens"
    monkeypatch.setattr(native, "usable", lambda path: (False, "not here"))
    assert "'plain-torch'" in digest.entry(run / "model", 1)["why"]


def test_a_model_that_transformers_runs_is_not_loaded_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    monkeypatch.setattr(digest, "load", None)
    assert digest.entry(tmp_path, 1) == {"sha256": None, "why": digest._ADAPTED}
