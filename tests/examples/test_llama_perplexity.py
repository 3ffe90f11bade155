"""The report's statistics of tokens are those of llama.cpp's tool, where that was built: make llama-server."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from compress.errors import UserError
from compress.model.source import default_pair

ROOT = Path(__file__).parents[2]
BUILT = ROOT / ".peers" / "llama-perplexity"
BINARY = BUILT if BUILT.is_file() else shutil.which("llama-perplexity")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama_perplexity", ROOT / "examples" / "llama_perplexity.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="no llama-perplexity: make llama-server")
def test_statistics_are_llama_perplexitys_to_three_digits(example: ModuleType) -> None:
    pytest.importorskip("gguf")
    theirs, ours = example.compare(Path(str(BINARY)), default_pair()[0], 4096, 512)
    assert theirs["KL mean"][0] > 0.01 and set(theirs) == set(ours)
    for name, (value, error) in ours.items():
        assert value == pytest.approx(theirs[name][0], rel=1e-3), name
        if error:
            # The errors of percentages have three decimals there.
            assert error == pytest.approx(theirs[name][1], rel=2e-3, abs=1e-6), name


def test_a_binary_that_loses_its_last_lines_is_run_again(example: ModuleType, tmp_path: Path) -> None:
    lines = [f"{name} : {0.25 + i}" + "%" * ("Δp" in name or "top" in name) for i, name in enumerate(example._FIGURES)]
    (tmp_path / "printed").write_text("\n".join(lines))
    binary = tmp_path / "llama-perplexity"
    # Whole at the fourth run; the first of them only writes the base.
    binary.write_text(f'#!/bin/sh\ncd "{tmp_path}"\necho >> runs\nhead -n $(($(wc -l < runs) * 3)) printed\n')
    binary.chmod(0o755)
    found = example.theirs(binary, tmp_path, tmp_path, "text", 512, tmp_path)
    assert len((tmp_path / "runs").read_text()) == 4 and set(found) == set(example._FIGURES.values())
    assert found["KL mean"] == (3.25, 0.0) and found["same top"] == (0.0925, 0.0)
    (tmp_path / "printed").write_text("\n".join(lines[:-1]))
    with pytest.raises(example.UserError, match="lost the end"):
        example.theirs(binary, tmp_path, tmp_path, "text", 512, tmp_path)


def test_tokens_are_read_from_its_file(example: ModuleType, tmp_path: Path) -> None:
    tokens = np.arange(36, dtype=np.int32)[::-1].reshape(3, 12)
    file = tmp_path / "base.kld"
    file.write_bytes(b"_logits_" + np.array([12, 320, 3], np.int32).tobytes() + tokens.tobytes() + b"more")
    assert torch.equal(example.read_tokens(file), torch.from_numpy(tokens.astype(np.int64)))
    file.write_bytes(b"something else")
    with pytest.raises(UserError, match="expected a file of llama-perplexity"):
        example.read_tokens(file)
