"""Blocks against the gguf package: what it dequantises is exactly what is read here, and kernels run all of it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.checkpoints.gguf.blocks import unpack
from runtime.checkpoints.gguf.checkpoint import open_gguf, to_packed
from runtime.checkpoints.gguf.parts import neighbours
from runtime.checkpoints.gguf.reader import TYPES, BlockType, TensorEntry
from runtime.formats.mxfp4 import LEVELS
from runtime.formats.packed import PackedWeight
from runtime.kernels.dispatch import Kernel, linear

gguf = pytest.importorskip("gguf")

QUANTISED = [kind for kind in TYPES.values() if not kind.plain]
# Bytes of a block at which its float16 numbers are.
_HALVES = {"Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)} | dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
_HALVES |= {"MXFP4": (), "Q2_K": (80, 82), "Q3_K": (108,)}
_PACKAGE_QUANTISES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0")


def random_rows(kind: BlockType, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """(rows, bytes of a row) that may stand for anything, but for two-bit codes of 3."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, blocks, kind.bytes), np.uint8)
    for at in _HALVES.get(kind.name, (0,)):
        raw[..., at : at + 2] = (rng.standard_normal((rows, blocks, 1)) * 0.05).astype("<f2").view(np.uint8)
    if kind.name == "MXFP4":
        raw[..., 0] = rng.integers(118, 128, (rows, blocks))
    if kind.name == "TQ2_0":
        raw[..., :64] &= 0b01010101
    return raw.reshape(rows, -1)


def dequantized(kind: BlockType, raw: np.ndarray) -> np.ndarray:
    return np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind.number)))


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows, blocks", [(1, 1), (7, 3), (33, 5)])
def test_every_type_is_read_as_the_package_reads_it(kind: BlockType, rows: int, blocks: int) -> None:
    raw = random_rows(kind, rows, blocks)
    found = unpack(kind, raw)
    codes = LEVELS.numpy()[found.codes] if kind.name == "MXFP4" else found.codes
    values = codes.reshape(*found.scale.shape, -1) * found.scale[..., None]
    if found.offset is not None:
        values = values - found.offset[..., None]
    assert np.array_equal(values.reshape(rows, -1), dequantized(kind, raw))


@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
def test_a_file_of_the_package_is_read_exactly(kind: BlockType, tmp_path: Path) -> None:
    n, k = 24, 2 * 256
    rng = np.random.default_rng(1)
    values = rng.standard_normal((n, k)).astype(np.float32)
    number = gguf.GGMLQuantizationType(kind.number)
    if kind.plain or kind.name in _PACKAGE_QUANTISES:
        raw = gguf.quants.quantize(values, number)
    else:
        raw = random_rows(kind, n, 512 // kind.weights)  # The package reads K-quants and does not make them.
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    for add, value in (
        (writer.add_block_count, 1),
        (writer.add_embedding_length, k),
        (writer.add_head_count, 4),
        (writer.add_feed_forward_length, 16),
        (writer.add_context_length, 16),
    ):
        add(value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", values[:3])
    shape = None if kind.plain and kind.name != "BF16" else raw.shape
    writer.add_tensor("blk.0.attn_q.weight", raw, raw_shape=shape, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_q.weight")
    wanted = np.asarray(gguf.quants.dequantize(stored.data, stored.tensor_type))
    checkpoint = open_gguf(path)
    assert np.array_equal(checkpoint.tensor("model.layers.0.self_attn.q_proj.weight").float().numpy(), wanted)
    found = checkpoint.weight("model.layers.0.self_attn.q_proj")
    assert isinstance(found, PackedWeight) != kind.plain and tuple(found.shape) == (n, k)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_kernels_run_every_type(kind: BlockType, native_path: str, tmp_path: Path) -> None:
    n, blocks = 37, 3
    raw = random_rows(kind, n, blocks)
    entry = TensorEntry("x", kind, (n, blocks * kind.weights), 0, raw.size)
    weight = to_packed("x.gguf", entry, unpack(kind, raw))
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0))
    exact = x @ torch.from_numpy(dequantized(kind, raw)).t()
    kernels = [Kernel(name, True, "", True, 1 if name == native_path else 0) for name in ("reference", native_path)]
    found, theirs = (linear(weight, None, kernel)(x) for kernel in kernels)
    assert torch.equal(found, theirs)
    # Inputs are rounded to 8 bits per group: about half a percent.
    assert float((found - exact).norm() / exact.norm()) < 0.02


def test_rows_go_to_llama_cpps_order() -> None:
    assert neighbours(24, 3)[:8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert sorted(neighbours(24, 3)) == list(range(24))
    for rows, heads in ((24, 5), (3, 3), (8, 0)):
        with pytest.raises(ValueError, match="are no"):
            neighbours(rows, heads)
