"""GGUF files as such: what a header may say, what it may not, and files that are damaged in every way. No library."""

import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime import load
from runtime.checkpoints.architecture import configuration, describe
from runtime.checkpoints.gguf.reader import BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, TQ1_0, TQ2_0, BlockType
from runtime.checkpoints.gguf.rope import llama3_factors
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.errors import UserError
from runtime.formats.packed import PackedWeight

HIDDEN, VOCAB, HEADS, KV_HEADS = 256, 40, 4, 2
Tensors = dict[str, tuple[BlockType, tuple[int, ...], bytes]]
# Bytes of a block at which a type has float16 numbers: random ones there would be NaN now and then.
_HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]} | {
    "TQ1_0": [52],
    "TQ2_0": [64],
}


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, np.ndarray):
        kind = {"float32": 6, "int32": 5}[value.dtype.name]
        return struct.pack("<IIQ", 9, kind, len(value)) + value.tobytes()
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))


def gguf_bytes(
    metadata: dict[str, Any], tensors: Tensors, alignment: int = 32, lie: dict[str, int] | None = None
) -> bytes:
    """A whole file. `lie` sets "tensors", "keys", "version", or the offset of the tensor that is named."""
    lie = lie or {}
    head = b"GGUF" + struct.pack(
        "<IQQ", lie.get("version", 3), lie.get("tensors", len(tensors)), lie.get("keys", len(metadata))
    )
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    body = b""
    for name, (kind, shape, raw) in tensors.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += _string(name) + sizes + struct.pack("<IQ", kind.number, lie.get(name, len(body)))
        body += raw + bytes(-len(raw) % alignment)
    return head + bytes(-len(head) % alignment) + body


def _random(kind: BlockType, shape: tuple[int, ...], rng: np.random.Generator) -> bytes:
    if kind == BF16:
        return torch.from_numpy(rng.standard_normal(shape)).bfloat16().view(torch.int16).numpy().tobytes()
    if kind.plain:
        return (rng.standard_normal(shape) * 0.1).astype({F32: "<f4", F16: "<f2"}[kind]).tobytes()
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // kind.weights, kind.bytes), np.uint8)
    for at in _HALVES[kind.name]:
        blocks[:, at : at + 2] = (rng.standard_normal((len(blocks), 1)) * 0.01).astype("<f2").view(np.uint8)
    if kind == TQ2_0:
        blocks[:, :64] &= 0b01010101  # No field is 3.
    return blocks.tobytes()


def model(**changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors of a Llama of one layer with a type for each matrix."""
    rng = np.random.default_rng(0)
    size = HIDDEN // HEADS
    kinds: dict[str, tuple[BlockType, tuple[int, ...]]] = {
        "token_embd.weight": (Q8_0, (VOCAB, HIDDEN)),
        "blk.0.attn_norm.weight": (F32, (HIDDEN,)),
        "blk.0.attn_q.weight": (Q4_K, (HIDDEN, HIDDEN)),
        "blk.0.attn_q.bias": (F32, (HIDDEN,)),
        "blk.0.attn_k.weight": (Q4_0, (KV_HEADS * size, HIDDEN)),
        "blk.0.attn_v.weight": (Q6_K, (KV_HEADS * size, HIDDEN)),
        "blk.0.attn_output.weight": (TQ2_0, (HIDDEN, HIDDEN)),
        "blk.0.ffn_norm.weight": (F32, (HIDDEN,)),
        "blk.0.ffn_gate.weight": (TQ1_0, (HIDDEN, HIDDEN)),
        "blk.0.ffn_up.weight": (Q5_K, (HIDDEN, HIDDEN)),
        "blk.0.ffn_down.weight": (Q4_1, (HIDDEN, HIDDEN)),
        "output_norm.weight": (F32, (HIDDEN,)),
        "output.weight": (BF16, (VOCAB, HIDDEN)),
    }
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "small",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": np.array([KV_HEADS], np.int32),
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5e5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
        "tokenizer.ggml.eos_token_id": 3,
    }
    metadata |= changes
    tensors = {name: (kind, shape, _random(kind, shape, rng)) for name, (kind, shape) in kinds.items()}
    return {key: value for key, value in metadata.items() if value is not None}, tensors


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """written(metadata, tensors, **options) is the file."""

    def write(metadata: dict[str, Any], tensors: Tensors, **options: Any) -> Path:
        path = tmp_path / "small.gguf"
        path.write_bytes(gguf_bytes(metadata, tensors, **options))
        return path

    return write


def walk(path: Path) -> None:
    """Reads all that a file has."""
    checkpoint = open_checkpoint(path)
    found = configuration(checkpoint)
    describe(vars(found) if hasattr(found, "__dict__") else found.to_dict())
    for name in checkpoint.names():
        checkpoint.tensor(name)
        checkpoint.weight(name.rpartition(".")[0])


def test_a_file_is_a_model(written: Callable[..., Path], kernels: str) -> None:
    path = written(*model())
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["model_type"] == "llama" and checkpoint.config["vocab_size"] == VOCAB
    assert checkpoint.config["attention_bias"] is True and checkpoint.config["mlp_bias"] is False
    assert checkpoint.bytes_on_disk() == path.stat().st_size and not checkpoint.tied
    kinds = {}
    for name in checkpoint.names():
        found = checkpoint.weight(name.removesuffix(".weight")) if name.endswith("_proj.weight") else None
        if isinstance(found, PackedWeight):
            kinds[name.split(".")[-2]] = (found.scheme.kind, found.scheme.group_size, found.offset is not None)
    assert kinds == {
        "q_proj": ("int4", 32, True),
        "k_proj": ("int4", 32, False),
        "v_proj": ("int8", 16, False),
        "o_proj": ("ternary", 256, False),
        "gate_proj": ("ternary", 256, False),
        "up_proj": ("int8", 32, True),
        "down_proj": ("int4", 32, True),
    }
    loaded = load(path, threads=None, kernels=kernels)
    assert loaded.end_tokens == {3}
    cache = loaded.decoder.new_cache()
    tokens = torch.arange(7)
    rows = Rows.chains([(cache.open(7), 0, 7)])
    assert bool(torch.isfinite(loaded.decoder.forward(tokens, rows, cache).logits).all())


def test_native_kernels_compute_what_the_reference_does(written: Callable[..., Path], native_path: str) -> None:
    path = written(*model())
    logits = []
    for kernels in ("reference", native_path):
        decoder = load(path, kernels=kernels).decoder
        cache = decoder.new_cache()
        rows = Rows.chains([(cache.open(9), 0, 9)])
        logits.append(decoder.forward(torch.arange(9) * 4, rows, cache).logits)
    assert float((logits[0] - logits[1]).norm() / logits[0].norm()) < 1e-3


def test_a_quantised_embedding_is_a_table_and_a_packed_head(written: Callable[..., Path]) -> None:
    metadata, tensors = model()
    del tensors["output.weight"]
    checkpoint = open_checkpoint(written(metadata, tensors))
    head, table = checkpoint.weight("lm_head"), checkpoint.tensor("model.embed_tokens.weight")
    assert isinstance(head, PackedWeight) and head.scheme.kind == "int8"
    assert table.dtype == torch.float32 and table.shape == (VOCAB, HIDDEN)
    tensors["token_embd.weight"] = (F16, (VOCAB, HIDDEN), bytes(2 * VOCAB * HIDDEN))
    assert open_checkpoint(written(metadata, tensors)).tied


def test_one_scale_in_all_blocks_is_one_scale_of_the_tensor(written: Callable[..., Path]) -> None:
    metadata, tensors = model()
    raw = np.frombuffer(tensors["blk.0.attn_output.weight"][2], np.uint8).reshape(-1, 66).copy()
    raw[:, 64:] = np.array([0.25], "<f2").view(np.uint8)
    raw[0] = 0b01010101  # A block of zeros, whose scale means nothing.
    tensors["blk.0.attn_output.weight"] = (TQ2_0, (HIDDEN, HIDDEN), raw.tobytes())
    found = open_checkpoint(written(metadata, tensors)).weight("model.layers.0.self_attn.o_proj")
    assert isinstance(found, PackedWeight) and found.scheme.group_size == 0
    assert found.scale.shape == (HIDDEN, 1) and bool((found.scale == 0.25).all())
    raw[3, 0] = 255
    tensors["blk.0.attn_output.weight"] = (TQ2_0, (HIDDEN, HIDDEN), raw.tobytes())
    with pytest.raises(UserError, match="two-bit code 3"):
        open_checkpoint(written(metadata, tensors)).weight("model.layers.0.self_attn.o_proj")


def test_llama_3s_factors_become_its_parameters(written: Callable[..., Path]) -> None:
    metadata, tensors = model()
    factors = llama3_factors(5e5, 64, 8.0)
    tensors["rope_freqs.weight"] = (F32, (32,), factors.tobytes())
    parameters = open_checkpoint(written(metadata, tensors)).config["rope_parameters"]
    assert parameters["rope_type"] == "llama3" and parameters["factor"] == 8.0
    tensors["rope_freqs.weight"] = (F32, (32,), (factors * np.linspace(1, 1.1, 32, dtype=np.float32)).tobytes())
    with pytest.raises(UserError, match="are not Llama 3's"):
        open_checkpoint(written(metadata, tensors))


def test_linear_and_yarn_scalings_are_read_and_others_are_not(written: Callable[..., Path]) -> None:
    said = {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 32}
    for kind in ("linear", "yarn"):
        path = written(*model(**said, **{"llama.rope.scaling.type": kind}))
        assert open_checkpoint(path).config["rope_parameters"]["rope_type"] == kind
    with pytest.raises(UserError, match="'longrope' is not run"):
        open_checkpoint(written(*model(**said, **{"llama.rope.scaling.type": "longrope"})))


def test_longrope_s_factors_are_two_tensors(written: Callable[..., Path]) -> None:
    metadata, tensors = model(
        **{"llama.rope.scaling.original_context_length": 32, "llama.rope.scaling.attn_factor": 1.25}
    )
    for number, name in enumerate(("short", "long")):
        tensors[f"rope_factors_{name}.weight"] = (F32, (32,), np.full(32, 1.5 + number, np.float32).tobytes())
    found = open_checkpoint(written(metadata, tensors)).config["rope_parameters"]
    assert found["rope_type"] == "longrope" and found["original_max_position_embeddings"] == 32
    assert (
        found["short_factor"] == [1.5] * 32 and found["long_factor"] == [2.5] * 32 and found["attention_factor"] == 1.25
    )
    del metadata["llama.rope.scaling.original_context_length"]
    with pytest.raises(UserError, match="original_context_length must be a positive integer"):
        open_checkpoint(written(metadata, tensors))
    del tensors["rope_factors_short.weight"]
    with pytest.raises(UserError, match=r"rope_factors_short\.weight must hold 32 F32 factors, found none"):
        open_checkpoint(written(metadata, tensors))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "mamba"}, "'mamba' is not run from a GGUF file"),
    "no architecture": ({"general.architecture": None}, "None is not run"),
    "blocks": ({"llama.block_count": 1 << 31}, "block_count is 2147483648, but there are 13 tensors"),
    "no blocks": ({"llama.block_count": None}, "llama.block_count must be a positive integer, found nothing"),
    "text": ({"llama.attention.head_count": "many"}, "head_count must be a positive integer, found 'many'"),
    "layers that differ": ({"llama.attention.head_count_kv": np.array([2, 4], np.int32)}, "must be a positive integer"),
    "width": ({"llama.embedding_length": 128}, "embedding_length is 128, and token_embd.weight has rows of 256"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "must be a positive number, found nan"),
    "rotation": ({"llama.rope.dimension_count": 63}, "rope.dimension_count must be even"),
    "values": ({"llama.attention.value_length": 32}, "keys and values of different sizes"),
    "end": ({"tokenizer.ggml.eos_token_id": VOCAB}, "eos_token_id must be one of 40 tokens, found 40"),
    "parts": ({"split.count": 3}, "one of 3 parts; join them"),
    "adapter": ({"general.type": "adapter"}, "holds 'adapter', expected a model"),
    "alignment": ({"general.alignment": 48}, "general.alignment must be a power of two, found 48"),
    "experts": ({"llama.expert_count": 1 << 30, "llama.expert_used_count": 2}, "must rise, to at most"),
}


@pytest.mark.parametrize("changes, sentence", WRONG.values(), ids=WRONG)
def test_metadata_that_no_model_has_is_refused(
    written: Callable[..., Path], changes: dict[str, Any], sentence: str
) -> None:
    walk(written(*model()))
    with pytest.raises(UserError) as error:
        walk(written(*model(**changes)))
    assert sentence in str(error.value) and "small.gguf" in str(error.value)


LIES: dict[str, tuple[dict[str, int], str]] = {
    "version": ({"version": 1}, "version 2 or 3"),
    "big-endian": ({"version": 3 << 24}, "version 2 or 3"),
    "tensors": ({"tensors": 1 << 62}, "4611686018427387904 are said to follow"),
    "keys": ({"keys": 1 << 40}, "1099511627776 are said to follow"),
    "beyond": ({"output.weight": 1 << 40}, "ends at byte"),
    "far beyond": ({"output.weight": (1 << 64) - 32}, "ends at byte"),
    "misaligned": ({"output.weight": 33}, "expected a multiple of 32"),
    "overlap": ({"output.weight": 0}, "overlap"),
}


@pytest.mark.parametrize("lie, sentence", LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused_before_anything_is_allocated(
    written: Callable[..., Path], lie: dict[str, int], sentence: str
) -> None:
    metadata, tensors = model()
    path = written(metadata, tensors, lie=lie)
    tracemalloc.start()
    with pytest.raises(UserError, match=sentence):
        open_checkpoint(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * path.stat().st_size


def test_counts_inside_values_are_checked(written: Callable[..., Path]) -> None:
    metadata, tensors = model()
    whole = gguf_bytes(metadata, tensors)
    at = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    path = written(metadata, tensors)
    for count in (len(whole), 1 << 61, (1 << 64) - 1):
        path.write_bytes(whole[:at] + struct.pack("<Q", count) + whole[at + 8 :])
        with pytest.raises(UserError, match="are said to follow"):
            open_checkpoint(path)


def test_tensors_that_the_format_or_the_architecture_lacks_are_refused(written: Callable[..., Path]) -> None:
    metadata, tensors = model()
    for name, kind, shape, sentence in (
        ("blk.0.attn_sinks.weight", F32, (4,), "attn_sinks.weight is of no llama model"),
        ("blk.0.attn_q.weight", Q4_0, (HIDDEN,), "must be a matrix or a plain vector"),
        ("blk.0.attn_q.weight", F32, (2, 2, 2), "must be a matrix or a plain vector"),
        ("blk.0.attn_q.weight", BlockType("IQ2_XXS", 16, 256, 66), (4, 256), "has the type IQ2_XXS"),
        ("blk.0.attn_q.weight", BlockType("?", 99, 1, 1), (4, 4), "has the type 99"),
        ("blk.0.attn_q.weight", Q4_K, (4, 128), "whole blocks of 256"),
        ("blk.0.attn_q.weight", F32, (0, 4), "expected positive ones"),
        ("blk.0.attn_q.weight", F32, (1, 1, 1, 1, 1), "has 5 dimensions"),
        ("blk.0.attn_q.weight", F32, (7, HIDDEN), "has 7 rows, expected 256"),
    ):
        changed = tensors | {name: (kind, shape, bytes(4 * HIDDEN * 8))}
        with pytest.raises(UserError) as error:
            walk(written(metadata, changed))
        assert sentence in str(error.value), error.value


def test_layers_that_predict_further_tokens_are_left_out(written: Callable[..., Path]) -> None:
    metadata, tensors = model(**{"llama.block_count": 2, "llama.nextn_predict_layers": 1})
    tensors["blk.1.nextn.eh_proj.weight"] = (F32, (4, 4), bytes(64))
    checkpoint = open_checkpoint(written(metadata, tensors))
    assert checkpoint.config["num_hidden_layers"] == 1 and not any("layers.1" in name for name in checkpoint.names())
    with pytest.raises(UserError, match="leaves 0 layers"):
        open_checkpoint(written(metadata | {"llama.nextn_predict_layers": 2}, tensors))


def test_infinite_scales_are_refused(written: Callable[..., Path]) -> None:
    metadata, tensors = model()
    raw = bytearray(tensors["blk.0.attn_k.weight"][2])
    raw[:2] = np.array([np.inf], "<f2").tobytes()
    tensors["blk.0.attn_k.weight"] = (*tensors["blk.0.attn_k.weight"][:2], bytes(raw))
    with pytest.raises(UserError, match=r"attn_k\.weight \(scales\) must be finite"):
        walk(written(metadata, tensors))


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for content, sentence in (
        (b"", "has 0 bytes"),
        (b"PK\x03\x04" * 9, "must begin with GGUF"),
        (b"GGUF\x03", "5 byt"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            open_checkpoint(path)
    with pytest.raises(UserError, match="no such directory"):
        open_checkpoint(tmp_path / "y.gguf")
    with pytest.raises(UserError, match="is a file; give the model's directory"):
        open_checkpoint(path.rename(tmp_path / "x.bin"))


def test_only_our_own_decoder_runs_a_file(written: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="only Specpress' own decoder runs a GGUF file"):
        load(written(*model()), adapter=True)


def test_a_file_cut_anywhere_is_refused(written: Callable[..., Path]) -> None:
    path = written(*model())
    whole = path.read_bytes()
    for part in range(40):
        path.write_bytes(whole[: len(whole) * part // 40])
        with pytest.raises(UserError):
            walk(path)
    header = whole.index(b"output.weight")
    for cut in range(0, header, 10):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError):
            walk(path)


def _mutants(whole: bytes, header: int, count: int, seed: int) -> Iterator[bytes]:
    """Files with some bytes changed, most of them in the header; a third with a large number put somewhere."""
    rng = random.Random(seed)
    for _ in range(count):
        mutant = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(4, header if rng.random() < 0.9 else len(whole))
            if rng.random() < 0.33:
                size = rng.choice((4, 8))
                mutant[at : at + size] = rng.choice((0, 1, 1 << 16, 1 << 31, (1 << 32) - 1)).to_bytes(size, "little")
            else:
                mutant[at] = rng.randrange(256)
        yield bytes(mutant[: rng.randrange(len(mutant)) if rng.random() < 0.05 else len(mutant)])


def _fuzz(path: Path, whole: bytes, count: int, seed: int) -> tuple[int, int]:
    """(files that were read, files that were refused); anything else is an error. Memory stays near the file's size."""
    read = refused = 0
    tracemalloc.start()
    for mutant in _mutants(whole, whole.index(b"output.weight") + 64, count, seed):
        path.write_bytes(mutant)
        tracemalloc.reset_peak()
        try:
            walk(path)
            read += 1
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
        assert tracemalloc.get_traced_memory()[1] < 64 * len(whole)
    tracemalloc.stop()
    return read, refused


def test_damaged_files_are_read_or_refused_in_a_sentence(written: Callable[..., Path]) -> None:
    path = written(*model())
    read, refused = _fuzz(path, path.read_bytes(), 300, seed=0)
    assert read > 10 and refused > 100


@pytest.mark.slow
def test_ten_thousand_damaged_files_are_read_or_refused(written: Callable[..., Path]) -> None:
    path = written(*model())
    read, refused = _fuzz(path, path.read_bytes(), 10_000, seed=1)
    assert read + refused == 10_000


def test_damaged_files_load_or_are_refused(written: Callable[..., Path]) -> None:
    path = written(*model())
    whole = path.read_bytes()
    for mutant in _mutants(whole, whole.index(b"output.weight") + 64, 40, seed=2):
        path.write_bytes(mutant)
        try:
            load(path)
        except UserError as error:
            assert "\n" not in str(error)
