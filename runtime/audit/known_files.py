"""Writes the known model (known.py) and its draft for other engines: safetensors directories and GGUF files."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

from runtime.audit.known import (
    DESCRIPTION,
    EXTRA,
    LETTERS,
    SHAPE,
    WEIGHTS,
    Array,
    KnownModel,
    byte_alphabet,
    make,
    perturbed,
    vocabulary_size,
)
from runtime.errors import UserError

# GGUF v3 (ggml/docs/gguf.md): the numbers of the metadata's types that are used here, and alignment of tensors.
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_ALIGNMENT = 32
_NORMAL, _CONTROL = 1, 3


def write(folder: Path, seed: int) -> None:
    """Writes target/ and draft/, each as GGUF in float32 and in float16, and audit.json: the whole folder or nothing.

    Raises UserError for a folder that exists.
    """
    if folder.exists():
        raise UserError(f"{folder} exists: name a folder that does not, or remove it")
    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        target = make(seed)
        for name, model in (("target", target), ("draft", perturbed(target, seed))):
            _write_directory(beside / name, model)
            (beside / f"{name}.gguf").write_bytes(gguf(model, f"audit {name}"))
            (beside / f"{name}-f16.gguf").write_bytes(gguf(model, f"audit {name}", half=True))
        about = {"schema": 1, "seed": seed, "letters": LETTERS}
        (beside / DESCRIPTION).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        for path in beside.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _write_directory(folder: Path, model: KnownModel) -> None:
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file(
        {name: value.astype(np.float32) for name, value in model.weights.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    s = SHAPE
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": s.hidden,
        "intermediate_size": s.inner,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_size,
        "max_position_embeddings": s.positions,
        "rms_norm_eps": s.epsilon,
        "rope_theta": s.theta,
        "vocab_size": vocabulary_size(),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": vocabulary_size() - 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate([*byte_alphabet(), EXTRA[0]])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(EXTRA[0][0], EXTRA[0][1])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(EXTRA[1], special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EXTRA[1], "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def gguf(model: KnownModel, name: str, half: bool = False) -> bytes:
    """The model as a GGUF file of architecture llama; rows of queries and keys in llama.cpp's order.

    half  matrices as float16, which holds the weights exactly: OpenVINO reads no float32 ones.
    """
    s, tensors = SHAPE, _gguf_tensors(model)
    tokens = [*byte_alphabet(), *EXTRA]
    kinds = [_NORMAL] * (len(tokens) - 1) + [_CONTROL]
    metadata = [
        _entry("general.architecture", _STRING, "llama"),
        _entry("general.name", _STRING, name),
        _entry("general.alignment", _UINT32, _ALIGNMENT),
        _entry("general.file_type", _UINT32, int(half)),
        _entry("llama.context_length", _UINT32, s.positions),
        _entry("llama.embedding_length", _UINT32, s.hidden),
        _entry("llama.block_count", _UINT32, s.layers),
        _entry("llama.feed_forward_length", _UINT32, s.inner),
        _entry("llama.attention.head_count", _UINT32, s.heads),
        _entry("llama.attention.head_count_kv", _UINT32, s.kv_heads),
        _entry("llama.attention.layer_norm_rms_epsilon", _FLOAT32, s.epsilon),
        _entry("llama.rope.dimension_count", _UINT32, s.head_size),
        _entry("llama.rope.freq_base", _FLOAT32, s.theta),
        _entry("llama.vocab_size", _UINT32, len(tokens)),
        _entry("tokenizer.ggml.model", _STRING, "gpt2"),
        _entry("tokenizer.ggml.pre", _STRING, "gpt-2"),
        _entry("tokenizer.ggml.tokens", _ARRAY, (_STRING, tokens)),
        _entry("tokenizer.ggml.token_type", _ARRAY, (_INT32, kinds)),
        _entry("tokenizer.ggml.merges", _ARRAY, (_STRING, [" ".join(EXTRA[0])])),
        _entry("tokenizer.ggml.bos_token_id", _UINT32, len(tokens) - 1),
        _entry("tokenizer.ggml.eos_token_id", _UINT32, len(tokens) - 1),
        _entry("tokenizer.ggml.add_bos_token", _BOOL, False),
    ]
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata)), *metadata]
    data, offset = [], 0
    for tensor, value in tensors.items():
        kind = int(half and value.ndim == 2)
        raw = value.astype(("<f4", "<f2")[kind]).tobytes()
        head += [_string(tensor), struct.pack("<I", value.ndim)]
        head += [struct.pack("<Q", size) for size in reversed(value.shape)]
        head.append(struct.pack("<IQ", kind, offset))
        data.append(raw + bytes(-len(raw) % _ALIGNMENT))
        offset += len(data[-1])
    front = b"".join(head)
    return front + bytes(-len(front) % _ALIGNMENT) + b"".join(data)


_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_tensors(model: KnownModel) -> dict[str, Array]:
    w = model.weights
    found = {"token_embd.weight": w["model.embed_tokens.weight"]}
    for layer in range(SHAPE.layers):
        for ours, theirs in _PARTS.items():
            value = w[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                # llama.cpp rotates neighbours, transformers a head's halves.
                value = value.reshape(-1, 2, SHAPE.head_size // 2, SHAPE.hidden).swapaxes(1, 2).reshape(value.shape)
            found[f"blk.{layer}.{theirs}.weight"] = value
    return found | {"output_norm.weight": w["model.norm.weight"], "output.weight": w["lm_head.weight"]}


def _entry(key: str, kind: int, value: Any) -> bytes:
    return _string(key) + struct.pack("<I", kind) + _value(kind, value)


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _string(value)
    if kind == _ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[kind], value)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
