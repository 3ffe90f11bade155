"""GGUF files by numpy alone: the header, llama.cpp's names, and every kind of block as codes, scales and offsets."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.files import Array, Weight

# Metadata's types by number: unsigned and signed integers, floats and a truth value.
_SCALARS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}
_PLAIN = {0: "<f4", 1: "<f2", 30: "<u2"}
_NAMES = {
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **{"attn_output": "self_attn.o_proj", "attn_qkv": "self_attn.qkv_proj", "attn_norm": "input_layernorm"},
    **{"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm"},
    **{"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_EXPERTS = {
    "ffn_gate_exps": ("gate_proj", "w1"),
    "ffn_up_exps": ("up_proj", "w3"),
    "ffn_down_exps": ("down_proj", "w2"),
}


class _Reader:
    """Little-endian values, one after the other."""

    def __init__(self, raw: bytes):
        self.raw, self.at = raw, 0

    def take(self, kind: str) -> Any:
        found = np.frombuffer(self.raw, kind, 1, self.at)[0]
        self.at += found.nbytes
        return found.item()

    def text(self) -> str:
        size = self.take("<u8")
        self.at += size
        return self.raw[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.take("<u4"), self.take("<u8")
            return [self.value(inner) for _ in range(count)]
        return self.take(_SCALARS[kind])


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, Array], dict[str, Weight]]:
    """What config.json would say; plain tensors, norms and the embedding as float64; and every linear layer."""
    reader = _Reader(file.read_bytes())
    assert reader.take("<u4") == 0x46554747 and reader.take("<u4") == 3
    count, keys = reader.take("<u8"), reader.take("<u8")
    said: dict[str, Any] = {}
    for _ in range(keys):
        name = reader.text()
        said[name] = reader.value(reader.take("<u4"))
    places = {}
    for _ in range(count):
        name = reader.text()
        sizes = [reader.take("<u8") for _ in range(reader.take("<u4"))]
        places[name] = (tuple(sizes[::-1]), reader.take("<u4"), reader.take("<u8"))
    start = -(-reader.at // said.get("general.alignment", 32)) * said.get("general.alignment", 32)
    data = np.frombuffer(reader.raw, np.uint8, offset=start)
    found = {name: _tensor(data[offset:], shape, kind) for name, (shape, kind, offset) in places.items()}
    config = _config(said, found)
    return config, *_named(config, said["general.architecture"], found)


def _config(said: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    kind = said["general.architecture"]
    own = {name.removeprefix(f"{kind}."): value for name, value in said.items()}
    model = {"qwen3moe": "qwen3_moe", "llama": "mixtral" if "expert_count" in own else "llama"}.get(kind, kind)
    rope: dict[str, Any] = {"rope_theta": own["rope.freq_base"], "rope_type": own.get("rope.scaling.type", "default")}
    rope |= {"factor": own.get("rope.scaling.factor"), "partial_rotary_factor": 1.0}
    rope["original_max_position_embeddings"] = own.get("rope.scaling.original_context_length")
    rope["partial_rotary_factor"] = own["rope.dimension_count"] / own["attention.key_length"]
    if "rope_freqs.weight" in found:
        factor = float(found["rope_freqs.weight"][-1])
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    return {
        "model_type": model,
        "hidden_size": own["embedding_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "head_dim": own["attention.key_length"],
        "vocab_size": _shape(found["token_embd.weight"])[0],
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],
        "hidden_act": "gelu_pytorch_tanh" if kind == "gemma" else "silu",
        "tie_word_embeddings": "output.weight" not in found and not isinstance(found["token_embd.weight"], Weight),
        "sliding_window": own.get("attention.sliding_window"),
        "rope_parameters": rope,
        "num_experts_per_tok": own.get("expert_used_count"),
        "norm_topk_prob": True,
    }


def _shape(part: Any) -> tuple[int, ...]:
    return part.codes.shape if isinstance(part, Weight) else part.shape


def _named(config: dict[str, Any], kind: str, found: dict[str, Any]) -> tuple[dict[str, Array], dict[str, Weight]]:
    """Plain tensors and layers under transformers' names, rows in its order, norms without the 1 of Gemma's files."""
    mixtral = config["model_type"] == "mixtral"
    tensors: dict[str, Array] = {}
    layers: dict[str, Weight] = {}
    for name, part in found.items():
        *block, theirs, end = name.split(".")
        base = f"model.layers.{block[1]}." if block else ""
        if theirs == "rope_freqs":
            continue
        if theirs in _EXPERTS:
            where = f"{base}{'block_sparse_moe' if mixtral else 'mlp'}.experts"
            for number in range(len(part)):
                layers[f"{where}.{number}.{_EXPERTS[theirs][mixtral]}"] = _layer(part[number])
            continue
        if theirs == "ffn_gate_inp":
            name = f"{base}{'block_sparse_moe' if mixtral else 'mlp'}.gate"
        elif theirs == "ffn_up" and kind == "phi3":
            name = f"{base}mlp.gate_up_proj"
        else:
            name = base + _NAMES[theirs] if block else _TOP[theirs]
        if kind == "llama" and theirs in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if theirs == "attn_q" else "num_key_value_heads"]
            part = _rows(part, np.arange(_shape(part)[0]).reshape(heads, -1, 2).swapaxes(1, 2).ravel())
        if kind == "gemma" and theirs.endswith("norm"):
            part = part - 1.0
        if end == "bias" or part.ndim == 1 if not isinstance(part, Weight) else False:
            tensors[f"{name}.{end}"] = part
            continue
        layers[name] = _layer(part)
        tensors[f"{name}.weight"] = layers[name].codes if layers[name].scale is None else _values(layers[name])
    for name in layers:
        if f"{name}.bias" in tensors:
            old = layers[name]
            layers[name] = Weight(old.codes, old.scale, old.offset, tensors[f"{name}.bias"])
    if "lm_head" not in layers:
        layers["lm_head"] = layers["model.embed_tokens"]
    return tensors, layers


def _layer(part: Any) -> Weight:
    return part if isinstance(part, Weight) else Weight(part)


def _rows(part: Any, order: Array) -> Any:
    if not isinstance(part, Weight):
        return part[order]
    assert part.scale is not None
    return Weight(part.codes[order], part.scale[order], None if part.offset is None else part.offset[order])


def _values(weight: Weight) -> Array:
    assert weight.scale is not None
    offset = 0.0 if weight.offset is None else weight.offset[..., None]
    grouped = weight.codes.reshape(*weight.scale.shape, -1)
    return (grouped * weight.scale[..., None] - offset).reshape(weight.codes.shape)


def _tensor(data: Array, shape: tuple[int, ...], kind: int) -> Any:
    """An array, a layer, or the layers of a stack."""
    if kind in _PLAIN:
        values = data[: int(np.prod(shape)) * np.dtype(_PLAIN[kind]).itemsize].view(_PLAIN[kind])
        if kind == 30:
            values = (values.astype("<u4") << 16).view("<f4")
        return values.astype(np.float64).reshape(shape)
    weights, size, unpack = _BLOCKS[kind]
    count = int(np.prod(shape)) // weights
    codes, scale, offset = unpack(data[: count * size].reshape(count, size))
    rows, groups = int(np.prod(shape[:-1])), count * scale.shape[-1] // int(np.prod(shape[:-1]))
    parts = codes.reshape(rows, -1).astype(float), scale.reshape(rows, groups)
    minus = None if offset is None else offset.reshape(rows, groups)
    if len(shape) == 2:
        return _one_scale(kind, Weight(*parts, minus))
    cut = [np.split(part, shape[0]) if part is not None else [None] * shape[0] for part in (*parts, minus)]
    return [_one_scale(kind, Weight(*each)) for each in zip(*cut, strict=True)]


def _one_scale(kind: int, weight: Weight) -> Weight:
    """Ternary blocks of one scale are a layer of one scale, whose inputs are rounded by token; others by group."""
    assert weight.scale is not None
    used = weight.scale[(weight.codes.reshape(*weight.scale.shape, -1) != 0).any(-1)]
    if kind not in (34, 35) or np.ptp(used) > 0:
        return weight
    return Weight(weight.codes, np.full((len(weight.codes), 1), used[0]))


Parts = tuple[Array, Array, Array | None]


def _half(b: Array, at: int) -> Array:
    return np.ascontiguousarray(b[:, at : at + 2]).view("<f2").astype(np.float64)


def _nibbles(qs: Array) -> Array:
    """(n, 32): first all low halves, then all high ones."""
    return np.concatenate((qs & 15, qs >> 4), axis=1).astype(int)


def _high(qh: Array) -> Array:
    """(n, 32) bits of four bytes, the lowest first, at the place of 16."""
    return np.unpackbits(qh, axis=1, bitorder="little").astype(int) << 4


def _k_scales(b: Array) -> tuple[Array, Array]:
    """(n, 8) scales and minima of six bits each, in twelve bytes: the last four have their upper two bits elsewhere."""
    q = b[:, 4:16].astype(int)
    scale = [q[:, j] & 63 if j < 4 else (q[:, j + 4] & 15) | (q[:, j - 4] >> 6) << 4 for j in range(8)]
    least = [q[:, j + 4] & 63 if j < 4 else (q[:, j + 4] >> 4) | (q[:, j] >> 6) << 4 for j in range(8)]
    return _half(b, 0) * np.stack(scale, axis=1), _half(b, 2) * np.stack(least, axis=1)


def _k_codes(b: Array, at: int, high: Array | None) -> Array:
    """(n, 256): of each 32 bytes the low halves, then the high ones; a fifth bit, of group g, in bit g of `high`."""
    groups = []
    for g in range(8):
        part = b[:, at + g // 2 * 32 : at + g // 2 * 32 + 32].astype(int) >> g % 2 * 4 & 15
        groups.append(part if high is None else part | (high.astype(int) >> g & 1) << 4)
    return np.concatenate(groups, axis=1)


def _q6_k(b: Array) -> Parts:
    parts = []
    for half in range(2):
        low, high = b[:, half * 64 : half * 64 + 64].astype(int), b[:, 128 + half * 32 : 160 + half * 32].astype(int)
        for quarter in range(4):
            four = low[:, quarter % 2 * 32 : quarter % 2 * 32 + 32] >> quarter // 2 * 4 & 15
            parts.append((four | (high >> 2 * quarter & 3) << 4) - 32)
    return np.concatenate(parts, axis=1), _half(b, 208) * b[:, 192:208].view(np.int8), None


def _tq1_0(b: Array) -> Parts:
    parts = []
    for first, last, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        for digit in range(digits):
            shifted = b[:, first:last].astype(int) * 3**digit & 255
            parts.append((shifted * 3 >> 8) - 1)
    return np.concatenate(parts, axis=1), _half(b, 52), None


def _tq2_0(b: Array) -> Parts:
    parts = [(b[:, j : j + 32].astype(int) >> 2 * field & 3) - 1 for j in (0, 32) for field in range(4)]
    return np.concatenate(parts, axis=1), _half(b, 64), None


def _with_minima(codes: Array, b: Array) -> Parts:
    scale, least = _k_scales(b)
    return codes, scale, least


# By a type's number: weights of a block, its bytes, and how it is unpacked.
_BLOCKS: dict[int, tuple[int, int, Any]] = {
    2: (32, 18, lambda b: (_nibbles(b[:, 2:]) - 8, _half(b, 0), None)),
    3: (32, 20, lambda b: (_nibbles(b[:, 4:]), _half(b, 0), -_half(b, 2))),
    6: (32, 22, lambda b: ((_nibbles(b[:, 6:]) | _high(b[:, 2:6])) - 16, _half(b, 0), None)),
    7: (32, 24, lambda b: (_nibbles(b[:, 8:]) | _high(b[:, 4:8]), _half(b, 0), -_half(b, 2))),
    8: (32, 34, lambda b: (np.ascontiguousarray(b[:, 2:]).view(np.int8), _half(b, 0), None)),
    12: (256, 144, lambda b: _with_minima(_k_codes(b, 16, None), b)),
    13: (256, 176, lambda b: _with_minima(_k_codes(b, 48, b[:, 16:48]), b)),
    14: (256, 210, _q6_k),
    34: (256, 54, _tq1_0),
    35: (256, 66, _tq2_0),
}
