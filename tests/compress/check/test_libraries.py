"""Checkpoints that the libraries write of the embedded pair's target give no alarm, and pruned ones are called so.

`make compressors` builds the environment of GPTQModel and llm-compressor, `make peers` that of llama.cpp.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from calib import corpora
from compress.check.check import Text, check
from compress.export import silent
from compress.export.gguf.file import write
from compress.model.source import default_pair

ROOT = Path(__file__).parents[3]
COMPRESSORS, PEERS = (ROOT / name / "bin" / "python" for name in (".compressors", ".peers"))
SCRIPT = Path(__file__).with_name("library_files.py")
Made = tuple[str, dict[str, object]]
pytestmark = pytest.mark.slow

COMPRESSED: tuple[Made, ...] = (
    ("gptqmodel", {"bits": 4, "group_size": 128, "desc_act": False}),
    ("gptqmodel", {"bits": 4, "group_size": 128, "desc_act": True, "act_group_aware": False}),
    ("gptqmodel", {"bits": 4, "group_size": 32, "desc_act": True, "act_group_aware": False, "sym": False}),
    ("gptqmodel", {"bits": 8, "group_size": 128, "desc_act": False}),
    ("gptqmodel", {"bits": 3, "group_size": 64, "desc_act": False}),
    ("gptqmodel", {"method": "awq", "bits": 4, "group_size": 128}),
    ("llmcompressor", {"method": "rtn", "options": {"scheme": "W4A16"}}),
    ("llmcompressor", {"method": "gptq", "options": {"scheme": "W4A16"}}),
    ("llmcompressor", {"method": "gptq", "options": {"scheme": "W4A16_ASYM"}}),
    ("llmcompressor", {"method": "awq", "options": {"scheme": "W4A16_ASYM"}}),
    ("llmcompressor", {"method": "smoothquant", "options": {"scheme": "W8A8"}}),
    ("llmcompressor", {"method": "rtn", "options": {"scheme": "FP8_DYNAMIC"}}),
)
PRUNED: Made = ("llmcompressor", {"method": "sparsegpt", "options": {"sparsity": 0.5, "mask_structure": "2:4"}})
BITSANDBYTES: tuple[Made, ...] = (
    ("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}),
    ("bitsandbytes", {"load_in_8bit": True}),
)
GGUF = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q4_0", "IQ4_NL")


def make(python: Path, kind: str, model: Path, out: Path, said: dict[str, object]) -> Path:
    text = out.with_name("text.txt")
    text.write_text("\n".join(corpora.load("stdlib").documents[:40])[:200_000], encoding="utf-8")
    words = [str(python), str(SCRIPT), kind, str(model), str(out), str(text), json.dumps(said)]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "GPTQMODEL_CPU_WORKERS": "4"}
    done = subprocess.run(words, cwd=out.parent, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.skipif(not COMPRESSORS.exists(), reason="needs `make compressors`")
@pytest.mark.parametrize(("kind", "said"), COMPRESSED)
def test_compressors(tmp_path: Path, kind: str, said: dict[str, object]) -> None:
    original = default_pair()[0]
    result = check(make(COMPRESSORS, kind, original, tmp_path / "model", said), original, Text(tokens=128))
    assert result.verdict == "good" and sum(weight.packed for weight in result.weights) == 28


@pytest.mark.skipif(not COMPRESSORS.exists(), reason="needs `make compressors`")
def test_pruned(tmp_path: Path) -> None:
    original = default_pair()[0]
    result = check(make(COMPRESSORS, PRUNED[0], original, tmp_path / "model", PRUNED[1]), original)
    assert result.level == "good" and "pruned, not broken; 50% zeros" in result.verdict


@pytest.mark.parametrize(("kind", "said"), BITSANDBYTES)
def test_bitsandbytes(tmp_path: Path, kind: str, said: dict[str, object]) -> None:
    pytest.importorskip("bitsandbytes")
    original = default_pair()[0]
    result = check(make(Path(sys.executable), kind, original, tmp_path / "model", said), original, Text(tokens=128))
    assert result.verdict == "good" and sum(weight.packed for weight in result.weights) == 28


@pytest.mark.skipif(not PEERS.exists(), reason="needs `make peers`")
@pytest.mark.parametrize("kind", GGUF)
def test_llama_cpp(tmp_path: Path, kind: str) -> None:
    original = default_pair()[0]
    (tmp_path / "plain").mkdir()
    write(original, tmp_path / "plain", silent)
    (plain,) = (tmp_path / "plain").glob("*.gguf")
    made = make(PEERS, "llama_cpp", plain, tmp_path / "model.gguf", {"kind": kind})
    result = check(made, original, Text(tokens=128))
    assert result.verdict == "good" and sum(weight.packed for weight in result.weights) >= 28
