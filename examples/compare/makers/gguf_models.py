"""GGUF files in llama.cpp's quantised types (Q4_0, Q4_K_M, …): `python -m makers.gguf_models SOURCE THREADS TYPE=OUT…`.

SOURCE is a float GGUF file, or a CONFIG.json: then one F16 file of random weights is written beside the first OUT,
quantised once for each TYPE, and removed.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray


def make(config: dict[str, Any], outs: dict[str, Path], threads: int) -> None:
    """Raises RuntimeError where llama.cpp refuses a type."""
    source = next(iter(outs.values())).with_suffix(".f16")
    try:
        _write_f16(config, source)
        quantize(source, outs, threads)
    finally:
        source.unlink(missing_ok=True)


def quantize(source: Path, outs: dict[str, Path], threads: int) -> None:
    """Writes `source` once for each type, by llama.cpp itself. Raises RuntimeError where it refuses one."""
    for kind, out in outs.items():
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.nthread, settings.ftype = threads, getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(settings)) != 0:
            raise RuntimeError(f"llama.cpp could not quantise to {kind}")


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What a transformers configuration says of the architecture, as a GGUF file says it."""
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    # Scaled rotary frequencies are left out: they change angles, not the work.
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])


def _write_f16(config: dict[str, Any], path: Path) -> None:
    """Tensor by tensor: matrices float16 with standard deviation 0.02, norms (ones) and biases float32."""
    writer = gguf.GGUFWriter(path, {"llama": "llama", "qwen2": "qwen2"}[config["model_type"]])
    add_shape(writer, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("no_vocab")
    tensors = list(_tensors(config))
    for name, shape in tensors:
        kind = np.dtype(np.float16 if len(shape) == 2 else np.float32)
        writer.add_tensor_info(name, shape, kind, int(np.prod(shape)) * kind.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draw = np.random.default_rng(0)
    for name, shape in tensors:
        writer.write_tensor_data(_values(draw, name, shape))
    writer.close()


def _values(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    if len(shape) == 2:
        return (draw.standard_normal(shape, np.float32) * 0.02).astype(np.float16)
    return np.zeros(shape, np.float32) if name.endswith(".bias") else np.ones(shape, np.float32)


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes (rows, columns) in the file's order."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, config["num_key_value_heads"] * size
    yield "token_embd.weight", (config["vocab_size"], hidden)
    for block in (f"blk.{i}" for i in range(config["num_hidden_layers"])):
        yield f"{block}.attn_norm.weight", (hidden,)
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{block}.attn_{part}.weight", (rows, hidden)
            if config["model_type"] == "qwen2":
                yield f"{block}.attn_{part}.bias", (rows,)
        yield f"{block}.attn_output.weight", (hidden, queries)
        yield f"{block}.ffn_norm.weight", (hidden,)
        yield f"{block}.ffn_gate.weight", (inner, hidden)
        yield f"{block}.ffn_up.weight", (inner, hidden)
        yield f"{block}.ffn_down.weight", (hidden, inner)
    yield "output_norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", (config["vocab_size"], hidden)


if __name__ == "__main__":
    source, threads = Path(sys.argv[1]), int(sys.argv[2])
    outs = {kind: Path(out) for kind, out in (argument.split("=", 1) for argument in sys.argv[3:])}
    if source.suffix == ".json":
        make(json.loads(source.read_text()), outs, threads)
    else:
        quantize(source, outs, threads)
