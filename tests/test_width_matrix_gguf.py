"""GGUF files of random models on every instruction path: the same bits at every width (test_width_matrix.py).

They are written by this project's writer, one kind of blocks each. Needs the gguf package.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from compress.export import silent
from compress.export.gguf.file import write
from tests.compress.packed_models import write_packed
from tests.conftest import write_tiny
from tests.test_width_matrix import PATHS, compare_model

gguf = pytest.importorskip("gguf")

BLOCKS = {"int4": "Q4_0", "int8": "Q8_0", "ternary": "TQ2_0", "int4-asymmetric": "Q4_1", "float": "F16"}
FAMILY = ("llama", "qwen3", "phi3", "mixtral", "mistral", "gemma", "qwen2")
MODELS = 70
VOCABULARY = 320


def write_gguf(folder: Path, seed: int) -> tuple[Path, str]:
    """The file of a number, blocks and families in turn, and what it is."""
    rng = np.random.default_rng(seed)
    scheme, family = list(BLOCKS)[seed % len(BLOCKS)], FAMILY[seed // len(BLOCKS) % len(FAMILY)]
    # TQ2_0's blocks are of 256 inputs, the others' of 32.
    hidden, inner = (256, 256) if scheme == "ternary" else (int(size) for size in rng.choice([64, 96, 128, 160], 2))
    layer_types = ["full_attention"]
    changes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1, "layer_types": layer_types}
    changes |= {"num_attention_heads": hidden // 32, "num_key_value_heads": 1, "head_dim": 32}
    source = write_tiny(family, folder / "plain", seed, **changes)
    # llama.cpp has a name for GPT-2's way of splitting text.
    content = json.loads((source / "tokenizer.json").read_text())
    content["pre_tokenizer"]["use_regex"] = True
    (source / "tokenizer.json").write_text(json.dumps(content))
    packed = source if scheme == "float" else write_packed(source, folder / "packed", scheme)
    (folder / "gguf").mkdir()
    write(packed, folder / "gguf", silent, floats="f16")
    shutil.rmtree(source)
    (file,) = (folder / "gguf").iterdir()
    assert BLOCKS[scheme] in {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    return file, f"{seed} {family} {BLOCKS[scheme]}"


def hold(folder: Path, seed: int, paths: tuple[str, ...]) -> int:
    """Rows compared; raises AssertionError where some differ."""
    file, label = write_gguf(folder, seed)
    found = [compare_model(file, label, VOCABULARY, seed, kernels) for kernels in paths]
    different = [what for _, texts in found for what in texts]
    assert not different, "\n".join(different)
    return sum(rows for rows, _ in found)


@pytest.mark.parametrize("seed", range(len(BLOCKS)))
def test_bits_of_every_kind_of_blocks(tmp_path: Path, seed: int) -> None:
    # The machine's best path; the others and the reference are the slow test's.
    assert hold(tmp_path, seed, PATHS[1:2] or PATHS) > 50


@pytest.mark.slow
def test_bits_of_many_files(tmp_path: Path) -> None:
    rows = sum(hold(tmp_path / str(seed), seed, PATHS) for seed in range(MODELS))
    print(f"{MODELS} GGUF files, {rows} rows, none differs")
