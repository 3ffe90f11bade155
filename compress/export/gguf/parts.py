"""What a GGUF file is to hold of a checkpoint, tensor by tensor, in llama.cpp's usual order."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from compress.errors import UserError
from runtime.checkpoints.architecture import Architecture
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.gguf.names import Place, to_gguf
from runtime.formats.packed import PackedWeight

_EMBEDDING = "model.embed_tokens"
Weight = PackedWeight | Tensor


@dataclass(frozen=True)
class Part:
    """A tensor of the file: `names` are transformers' tensors, one, or one for each expert of a stack."""

    place: Place
    names: tuple[str, ...]
    linear: bool


def parts(checkpoint: Checkpoint, kind: str, a: Architecture) -> Iterator[Part]:
    """What the file is to hold, in llama.cpp's usual order. Raises UserError for a tensor that has no name there."""
    names = frozenset(checkpoint.names())
    yield _part([f"{_EMBEDDING}.weight"], kind, linear=False)
    if not a.tied:
        yield _part(["lm_head.weight"], kind)
    yield _part(["model.norm.weight"], kind, linear=False)
    for number in range(a.layers):
        prefix = f"model.layers.{number}"
        vectors = ["input_layernorm", "post_attention_layernorm"]
        vectors += ["self_attn.q_norm", "self_attn.k_norm"] if a.query_key_norm else []
        for vector in vectors:
            yield _part([f"{prefix}.{vector}.weight"], kind, linear=False)
        layers = ["self_attn.qkv_proj"] if a.fused else [f"self_attn.{part}_proj" for part in "qkv"]
        layers.append("self_attn.o_proj")
        if a.experts is None:
            layers += ["mlp.gate_up_proj"] if a.fused else ["mlp.gate_proj", "mlp.up_proj"]
            layers.append("mlp.down_proj")
        for layer in layers:
            yield _part([f"{prefix}.{layer}.weight"], kind)
            if f"{prefix}.{layer}.bias" in names:
                yield _part([f"{prefix}.{layer}.bias"], kind, linear=False)
        if a.experts is not None:
            yield from _mixture(names, prefix, kind, a)


def _mixture(names: frozenset[str], prefix: str, kind: str, a: Architecture) -> Iterator[Part]:
    assert a.experts is not None
    base = next((f"{prefix}.{name}" for name in a.experts.names if f"{prefix}.{name}.gate.weight" in names), None)
    if base is None:
        raise UserError(f"{prefix}.mlp.gate.weight: expected a layer that chooses experts, found none")
    yield _part([f"{base}.gate.weight"], kind, linear=False)
    first = f"{base}.experts.0"
    old = any(name.startswith(f"{first}.w1.") for name in names)
    for part in ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj"):
        yield _part([f"{base}.experts.{index}.{part}.weight" for index in range(a.experts.count)], kind)


def _part(names: list[str], kind: str, linear: bool = True) -> Part:
    place = to_gguf(names[0], kind)
    assert place is not None, f"{names[0]} has no name in GGUF"
    return Part(place, tuple(names), linear)


def read(checkpoint: Checkpoint, name: str) -> Weight:
    """A tensor of the checkpoint: packed or plain, also out of experts that are fused in one tensor."""
    prefix, _, part = name.rpartition(".")
    if part == "bias":
        # A packed layer's is what it adds, which in some layouts is not what is stored.
        whole = checkpoint.weight(prefix)
        return whole.bias if isinstance(whole, PackedWeight) and whole.bias is not None else checkpoint.tensor(name)
    if name.endswith("norm.weight") or prefix == _EMBEDDING:
        return checkpoint.tensor(name)
    base, fused, rest = prefix.partition(".experts.")
    if fused and f"{base}.experts.gate_up_proj" in checkpoint.shards:
        index, _, layer = rest.partition(".")
        stack = checkpoint.tensor(f"{base}.experts.{'down_proj' if layer == 'down_proj' else 'gate_up_proj'}")
        if layer == "down_proj":
            return stack[int(index)]
        return stack[int(index)].chunk(2)[0 if layer == "gate_proj" else 1]
    return checkpoint.weight(prefix)
