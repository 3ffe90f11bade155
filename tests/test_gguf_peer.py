"""llama.cpp runs our GGUF files as we run them, or the models they were made from. It wants `make peers`."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calib import corpora
from calib.prompts import prompts
from compress.export import silent
from compress.export.gguf.file import write
from compress.model.source import default_pair
from runtime import load
from runtime.checkpoints.gguf.names import ARCHITECTURES, FORMS
from runtime.contract import Rows
from runtime.model.load import Model
from tests.compress.export import gguf_families
from tests.runtime.model import families, test_longrope

pytest.importorskip("gguf")
PEERS = Path(__file__).parents[1] / ".peers" / "bin" / "python"
WINDOW = 192

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PEERS.is_file(), reason="no .peers environment: make peers"),
]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return prompts(corpora.load("stdlib"), 20, 0)


def _export(model: Path, out: Path, **options: str) -> Path:
    out.mkdir()
    write(model, out, silent, **options)  # type: ignore[arg-type]
    (file,) = out.iterdir()
    return file


def _theirs(
    file: Path, tokens: list[list[int]], texts: list[str], vocabulary: int, out: Path
) -> tuple[list[np.ndarray], list[list[int]]]:
    out.mkdir()
    (out / "given.json").write_text(json.dumps({"tokens": tokens, "texts": texts, "vocabulary": vocabulary}))
    script = Path(__file__).with_name("llama_cpp_logits.py")
    subprocess.run([PEERS, script, file, out / "given.json", out], check=True, timeout=600)
    return [np.load(out / f"{i}.npy") for i in range(len(tokens))], json.loads((out / "ids.json").read_text())


def _ours(model: Model, tokens: list[int]) -> np.ndarray:
    cache = model.decoder.new_cache()
    rows = Rows.chains([(cache.open(len(tokens)), 0, len(tokens))])
    return model.decoder.forward(torch.tensor(tokens), rows, cache).logits.numpy()


def _compare(ours: Model, file: Path, texts: list[str], out: Path) -> tuple[float, float]:
    """Share of equal argmax over all positions, and the relative norm of the difference of logits."""
    ids = [ours.tokenizer(text)["input_ids"] for text in texts]
    tokens = [list(found[-WINDOW:]) for found in ids]
    theirs, their_ids = _theirs(file, tokens, texts, ours.decoder.vocab_size, out)
    assert their_ids == ids
    found = [_ours(ours, one) for one in tokens]
    mine, other = np.concatenate(found), np.concatenate(theirs)
    agreement = float((mine.argmax(-1) == other.argmax(-1)).mean())
    return agreement, float(np.linalg.norm(mine - other) / np.linalg.norm(mine))


def test_a_float_file_gives_the_same_next_tokens(texts: list[str], tmp_path: Path) -> None:
    source = default_pair()[0]
    file = _export(source, tmp_path / "f32", floats="f32")
    agreement, difference = _compare(load(source), file, texts, tmp_path / "out")
    print(f"float32: argmax agreement {agreement:.5f}, logits differ by {difference:.2e}")
    assert agreement >= 0.995 and difference < 1e-3


FAMILY = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma")


@pytest.mark.parametrize("kind", FAMILY)
def test_every_architecture_is_computed_as_here(kind: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tmp_path / kind
    # llama.cpp's Qwen3-MoE has no other way of weighing experts.
    shutil.copytree(tiny(kind, **({"norm_topk_prob": True} if kind == "qwen3_moe" else {})), model)
    content = json.loads((model / "tokenizer.json").read_text())
    content["pre_tokenizer"]["use_regex"] = True
    (model / "tokenizer.json").write_text(json.dumps(content))
    file = _export(model, tmp_path / "out", floats="f32")
    tokens = torch.randint(1, 320, (33,), generator=torch.Generator().manual_seed(1)).tolist()
    ((theirs,), _) = _theirs(file, [tokens], [], 320, tmp_path / "theirs")
    ours = _ours(load(model), tokens)
    difference = float(np.linalg.norm(ours - theirs) / np.linalg.norm(ours))
    print(f"{kind}: logits differ by {difference:.2e}")
    assert difference < 1e-3


def _families(kind: str, file: Path, model: Path, out: Path) -> float:
    tokens = torch.randint(1, 8000, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    ((theirs,), _) = _theirs(file, [tokens], [], families.VOCABULARY, out)
    ours = _ours(load(model), tokens)
    difference = float(np.linalg.norm(ours - theirs) / np.linalg.norm(ours))
    print(f"{kind}: logits differ by {difference:.2e}")
    return difference


@pytest.mark.parametrize("kind", gguf_families.CHANGES)
def test_every_family_is_computed_as_here(kind: str, tmp_path: Path) -> None:
    model = gguf_families.write(kind, tmp_path / kind)
    file = _export(model, tmp_path / "out", floats="f32")
    # llama.cpp's GELU is a table of float16: with it some 3e-4, without 1e-5.
    assert _families(kind, file, model, tmp_path / "theirs") < 1e-3


@pytest.mark.parametrize("kind, changes", gguf_families.VARIANTS.values(), ids=gguf_families.VARIANTS)
def test_every_family_is_computed_as_here_in_another_form(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = gguf_families.write(kind, tmp_path / kind, **changes)
    file = _export(model, tmp_path / "out", floats="f32")
    assert _families(kind, file, model, tmp_path / "theirs") < 1e-3


@pytest.mark.parametrize(("first", "context"), [(300, None), (64, test_longrope.ALL)])
def test_longrope_takes_the_factors_of_the_context(first: int, context: int | None, tmp_path: Path) -> None:
    """llama.cpp's contexts have 256 tokens or more: of 300 the short ones, of 64 the long ones."""
    model = test_longrope.write(tmp_path / "model", first)
    file = _export(model, tmp_path / "out", floats="f32")
    tokens = torch.randint(1, 320, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    ((theirs,), _) = _theirs(file, [tokens], [], 320, tmp_path / "theirs")
    ours = _ours(load(model, context=context), tokens)
    assert float(np.linalg.norm(ours - theirs) / np.linalg.norm(ours)) < 1e-4


@pytest.mark.parametrize("kind", gguf_families.SQUARE)
def test_heads_that_are_refused_do_not_load(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = ARCHITECTURES[kind]
    monkeypatch.setitem(FORMS, name, replace(FORMS[name], square=False))
    file = _export(gguf_families.write(kind, tmp_path / kind, head_dim=48), tmp_path / "out", floats="f32")
    with pytest.raises(subprocess.CalledProcessError):
        _theirs(file, [[5, 6, 7]], [], families.VOCABULARY, tmp_path / "theirs")


def test_experts_in_mxfp4_are_computed_as_here(tmp_path: Path) -> None:
    model = gguf_families.write("gpt_oss", tmp_path / "gpt_oss", hidden_size=64, intermediate_size=96)
    gguf_families.in_mxfp4(model)
    file = _export(model, tmp_path / "out")
    assert _families("gpt_oss, mxfp4", file, model, tmp_path / "theirs") < 0.02


@pytest.mark.parametrize("recipe", ["int8-dynamic", "int4-rtn", "ternary"])
def test_a_quantised_file_gives_the_same_logits(
    recipe: str, texts: list[str], pair_target: Callable[[str], Path], tmp_path: Path
) -> None:
    file = _export(pair_target(recipe), tmp_path / "out")
    agreement, difference = _compare(load(file), file, texts[:8], tmp_path / "theirs")
    print(f"{recipe}: argmax agreement {agreement:.5f}, logits differ by {difference:.2e}")
    assert difference < 0.02
