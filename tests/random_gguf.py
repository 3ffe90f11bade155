"""Small random GGUF files in every kind of block that is read: codes are random bits; written by the gguf package."""

from pathlib import Path
from typing import Any

import numpy as np

FAMILY = ("llama", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "qwen3moe")
# By name: weights of a block, its bytes, and where half floats lie with their size in units of a weight's deviation.
BLOCKS: dict[str, tuple[int, int, dict[int, float]]] = {
    "Q4_0": (32, 18, {0: 1 / 4.6}),
    "Q4_1": (32, 20, {0: 1 / 4.6, 2: -7.5 / 4.6}),
    "Q5_0": (32, 22, {0: 1 / 9.2}),
    "Q5_1": (32, 24, {0: 1 / 9.2, 2: -15.5 / 9.2}),
    "Q8_0": (32, 34, {0: 1 / 74}),
    "Q4_K": (256, 144, {0: 1 / 165, 2: 7.5 / 165}),
    "Q5_K": (256, 176, {0: 1 / 330, 2: 15.5 / 330}),
    "Q6_K": (256, 210, {208: 1 / 1360}),
    "TQ1_0": (256, 54, {52: 1 / 0.8}),
    "TQ2_0": (256, 66, {64: 1 / 0.8}),
}
PLAIN = ("F32", "F16", "BF16")


def write(file: Path, seed: int) -> str:
    """Writes the file of a number, families and kinds of blocks in turn; returns what it is."""
    import gguf

    rng = np.random.default_rng(seed)
    family, first = FAMILY[seed % len(FAMILY)], list(BLOCKS)[seed // len(FAMILY) % len(BLOCKS)]
    kind = "llama" if family == "mixtral" else family
    # Blocks of 256 weights need rows of as many.
    wide = [256, 512] if BLOCKS[first][0] == 256 else [64, 96, 160, 256]
    hidden, inner = (int(size) for size in rng.choice(wide, 2))
    kv_heads, size = int(rng.integers(1, 3)), int(rng.choice([16, 32, 64]))
    heads, vocab = kv_heads * int(rng.choice([1, 2, 4])), int(rng.integers(33, 90))
    if BLOCKS[first][0] == 256 and rng.random() < 0.7:
        kv_heads, size, heads = 2, 64, 4
    writer = gguf.GGUFWriter(file, kind)

    def matrix(name: str, *shape: int, plain: bool = False) -> None:
        able = [one for one in BLOCKS if shape[-1] % BLOCKS[one][0] == 0]
        chosen = first if first in able and rng.random() < 0.7 else str(rng.choice([*able, *PLAIN]))
        chosen = str(rng.choice(PLAIN)) if plain else chosen
        kinds = gguf.GGMLQuantizationType
        if chosen in PLAIN:
            values = (rng.standard_normal(shape) * shape[-1] ** -0.5).astype("<f4")
            if chosen == "F16":
                return writer.add_tensor(name, values.astype("<f2"))
            if chosen == "BF16":
                halves = (values.view("<u4") >> 16).astype("<u2")
                return writer.add_tensor(name, halves.view(np.uint8), raw_dtype=kinds.BF16)
            return writer.add_tensor(name, values)
        return writer.add_tensor(name, blocks(rng, chosen, shape), raw_dtype=kinds[chosen])

    def vector(name: str, count: int, spread: float, middle: float) -> None:
        writer.add_tensor(name, (rng.standard_normal(count) * spread + middle).astype("<f4"))

    _describe(writer, rng, family, hidden, inner, heads, kv_heads, size)
    matrix("token_embd.weight", vocab, hidden)
    vector("output_norm.weight", hidden, 0.1, 1.0)
    if rng.random() < 0.5:
        matrix("output.weight", vocab, hidden)
    for norm in ("attn_norm", "ffn_norm"):
        vector(f"blk.0.{norm}.weight", hidden, 0.1, 1.0)
    if kind.startswith("qwen3"):
        for norm in ("attn_q_norm", "attn_k_norm"):
            vector(f"blk.0.{norm}.weight", size, 0.1, 1.0)
    parts = {"attn_q": heads * size, "attn_k": kv_heads * size, "attn_v": kv_heads * size}
    if family == "phi3":
        parts = {"attn_qkv": sum(parts.values())}
    for name, count in parts.items():
        matrix(f"blk.0.{name}.weight", count, hidden)
        if family == "qwen2":
            vector(f"blk.0.{name}.bias", count, 0.1, 0.0)
    matrix("blk.0.attn_output.weight", hidden, heads * size)
    if family in ("mixtral", "qwen3moe"):
        experts = int(rng.integers(2, 6))
        writer.add_expert_count(experts)
        writer.add_expert_used_count(int(rng.integers(1, experts + 1)))
        writer.add_expert_feed_forward_length(inner)
        matrix("blk.0.ffn_gate_inp.weight", experts, hidden, plain=True)
        for name in ("gate", "up"):
            matrix(f"blk.0.ffn_{name}_exps.weight", experts, inner, hidden)
        matrix("blk.0.ffn_down_exps.weight", experts, hidden, inner)
    else:
        if family != "phi3":
            matrix("blk.0.ffn_gate.weight", inner, hidden)
        matrix("blk.0.ffn_up.weight", 2 * inner if family == "phi3" else inner, hidden)
        matrix("blk.0.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return f"{seed} {family} {first}"


def blocks(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Any:
    """(…, bytes of a row) uint8: random codes, scales that give weights a deviation of about 1 / √inputs."""
    weights, size, halves = BLOCKS[kind]
    lead = (*shape[:-1], shape[-1] // weights)
    made = rng.integers(0, 256, (*lead, size), dtype=np.uint8)
    if kind == "TQ2_0":
        made[..., :64] = sum(rng.integers(0, 3, (*lead, 64)) << 2 * i for i in range(4))
    one = kind.startswith("TQ") and rng.random() < 0.5
    for at, unit in halves.items():
        near = rng.uniform(0.6, 1.4, (1,) if one else (*lead, 1)) * unit * shape[-1] ** -0.5
        made[..., at : at + 2] = np.broadcast_to(near, (*lead, 1)).astype("<f2").view(np.uint8)
    return made.reshape(*shape[:-1], -1)


def _describe(
    writer: Any, rng: np.random.Generator, family: str, hidden: int, inner: int, heads: int, kv_heads: int, size: int
) -> None:
    import gguf

    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(float(rng.choice([1e-5, 1e-6])))
    base = float(rng.choice([1e4, 5e5]))
    writer.add_rope_freq_base(base)
    writer.add_rope_dimension_count(size // 2 if family == "phi3" and rng.random() < 0.5 else size)
    if family == "phi3":
        writer.add_sliding_window(int(rng.integers(1, 30)))
        return
    match int(rng.integers(5)):
        case 1:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(2.5)
        case 2:
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(64)
        case 3 if family == "llama":
            wave = 2 * np.pi * base ** (np.arange(0, size, 2) / size)
            share = np.clip((8192 / wave - 1) / 3, 0, 1)
            writer.add_tensor("rope_freqs.weight", (1 / ((1 - share) / 8 + share)).astype("<f4"))
