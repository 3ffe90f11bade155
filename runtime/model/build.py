"""From a checkpoint to a decoder: its weights packed for the kernels that run, block by block."""

from dataclasses import fields, replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from runtime.cache import scheme
from runtime.checkpoints.architecture import Architecture
from runtime.checkpoints.directory import Checkpoint
from runtime.contract import Decoder
from runtime.errors import UserError
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import KINDS
from runtime.kernels.dispatch import Kernel, join, linear
from runtime.kernels.joined import Joined, Linear
from runtime.model.layers import Attention, Block, Mixture, Mlp, Parts, has_planes, require_used

Weight = PackedWeight | Tensor


def build(
    checkpoint: Checkpoint,
    architecture: Architecture,
    config: Any,
    kernel: Kernel,
    device: torch.device,
    planes: bool = False,
) -> Decoder:
    """The decoder of a checkpoint; `planes` as `load` has it.

    Raises UserError naming a missing or misshapen tensor, why there can be no planes, and kernels that no layer fits.
    """
    a, backend = architecture, kernel.backend
    if planes and not (backend.has_planes and kernel.exact):
        raise UserError(f"planes need Specpress' own kernels, found {kernel.name!r}; use kernels='auto' or 'reference'")
    kv = scheme.read(checkpoint, a, device)
    reader = _Reader(checkpoint, kernel, device, planes)
    shape = (a.vocab, a.hidden)
    table = reader.table("model.embed_tokens.weight", shape)
    embedding: Tensor | None = table
    if backend.repacks:
        # A tied model's table lies in the head's blocks. Another is copied now, so that its file's pages can go.
        embedding = None if a.tied else table.clone()
    blocks = tuple(_block(reader, a, number) for number in range(a.layers))
    norm = reader.vector("model.norm.weight", a.hidden)
    head = linear(table if a.tied else reader.weight("lm_head", shape), reader.bias("lm_head", a.vocab), kernel)
    parts = Parts(embedding, blocks, norm, head)
    if planes and not has_planes(parts):
        raise UserError(
            f"{checkpoint.path.name}: planes are the halves of int8 weights, and this model has no int8 layers;"
            " compress it to int8, or choose another drafter than nested"
        )
    require_used(kernel, parts)
    decoder: Decoder = resolve_name(backend.decoder)(a, config, parts, kernel, kv)
    return decoder


class _Reader:
    """Takes tensors out of a checkpoint, checked and on the device."""

    def __init__(self, checkpoint: Checkpoint, kernel: Kernel, device: torch.device, planes: bool):
        self.checkpoint, self.kernel, self.device, self.planes = checkpoint, kernel, device, planes
        self.names = frozenset(checkpoint.names())

    def weight(self, prefix: str, shape: tuple[int, int]) -> Weight:
        """The (N, K) weight of a linear layer, packed or float."""
        found = self.checkpoint.weight(prefix, unpack=not self.kernel.backend.repacks)
        self._check(f"{prefix}.weight", tuple(found.shape), shape)
        found = _to(found, self.device)
        if not (self.planes and isinstance(found, PackedWeight) and KINDS[found.scheme.kind].has_planes):
            return found
        if found.scheme.group_size:
            raise UserError(
                f"{self.checkpoint.path.name}: {prefix} has int8 groups of {found.scheme.group_size} inputs, and planes"
                " need one scale per output row; choose another drafter than nested"
            )
        return replace(found, planes=True)

    def bias(self, prefix: str, size: int) -> Tensor | None:
        name = f"{prefix}.bias"
        return self.vector(name, size) if name in self.names else None

    def vector(self, name: str, size: int) -> Tensor:
        return self.table(name, (size,)).float()

    def table(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self.checkpoint.tensor(name)
        self._check(name, tuple(found.shape), shape)
        return found.to(self.device)

    def stack(self, name: str) -> Tensor:
        """Plain weights of experts that are fused in one tensor."""
        found = self.checkpoint.tensor(name)
        if not found.is_floating_point() or found.dtype.itemsize == 1:
            raise UserError(
                f"{self.checkpoint.path.name}: tensor {name} must be float32, float16 or bfloat16, found {found.dtype};"
                " fused experts are read plain, so use a checkpoint that has them one by one"
            )
        return found.to(self.device)

    def linear(self, prefix: str, shape: tuple[int, int]) -> Linear:
        return linear(self.weight(prefix, shape), self.bias(prefix, shape[0]), self.kernel)

    def join(self, prefixes: list[str], sizes: list[int], inputs: int) -> Joined:
        """Several layers of one input; one prefix with several sizes is a layer fused on disk."""
        outputs = [sum(sizes)] if len(prefixes) == 1 else sizes
        parts = list(zip(prefixes, outputs, strict=True))
        weights = [self.weight(p, (size, inputs)) for p, size in parts]
        return join(weights, [self.bias(p, size) for p, size in parts], sizes, self.kernel)

    def _check(self, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise UserError(
                f"{self.checkpoint.path.name}: tensor {name} has shape {found}, config.json implies {expected};"
                " the two do not belong together"
            )


def _to(weight: Weight, device: torch.device) -> Weight:
    """Moves a weight, and drops what only its file format needs."""
    if isinstance(weight, Tensor):
        return weight.to(device)
    parts: dict[str, Any] = {field.name: getattr(weight, field.name) for field in fields(PackedWeight)}
    moved: dict[str, Any] = {key: v.to(device) if isinstance(v, Tensor) else v for key, v in parts.items()}
    return PackedWeight(**moved)


def _block(reader: _Reader, a: Architecture, number: int) -> Block:
    prefix = f"model.layers.{number}"
    attn = f"{prefix}.self_attn"
    heads, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    names = [f"{attn}.qkv_proj"] if a.fused else [f"{attn}.{part}_proj" for part in "qkv"]
    attention = Attention(
        qkv=reader.join(names, [heads, kv, kv], a.hidden),
        out=reader.linear(f"{attn}.o_proj", (a.hidden, heads)),
        q_norm=reader.vector(f"{attn}.q_norm.weight", a.head_dim) if a.query_key_norm else None,
        k_norm=reader.vector(f"{attn}.k_norm.weight", a.head_dim) if a.query_key_norm else None,
        window=a.windows[number],
    )
    dense = a.experts is None or number in a.dense_layers
    return Block(
        input_norm=reader.vector(f"{prefix}.input_layernorm.weight", a.hidden),
        attention=attention,
        mlp_norm=reader.vector(f"{prefix}.post_attention_layernorm.weight", a.hidden),
        mlp=_mlp(reader, a, f"{prefix}.mlp") if dense else _stacked(_mixture(reader, a, prefix), reader.kernel),
    )


def _stacked(mixture: Mixture, kernel: Kernel) -> Mixture:
    """The mixture as the kernels want it; block by block, so that only one is held twice while it is moved."""
    stack = kernel.backend.stack
    if not stack or not kernel.exact:
        return mixture
    made: Mixture = resolve_name(stack)(mixture)
    return made


def _mlp(reader: _Reader, a: Architecture, prefix: str) -> Mlp:
    names = [f"{prefix}.gate_up_proj"] if a.fused else [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
    return Mlp(
        gate_up=reader.join(names, [a.intermediate, a.intermediate], a.hidden),
        down=reader.linear(f"{prefix}.down_proj", (a.hidden, a.intermediate)),
    )


def _mixture(reader: _Reader, a: Architecture, prefix: str) -> Mixture:
    """Experts fused as (E, 2I, H) and (E, H, I), or one by one as older files have them."""
    experts = a.experts
    assert experts is not None
    size = experts.hidden
    for name in experts.names:
        base = f"{prefix}.{name}"
        if f"{base}.gate.weight" not in reader.names:
            continue
        router = reader.linear(f"{base}.gate", (experts.count, a.hidden))
        if f"{base}.experts.gate_up_proj" in reader.names:
            gate_up, down = (reader.stack(f"{base}.experts.{part}") for part in ("gate_up_proj", "down_proj"))
            made = [
                Mlp(join([g], [None], [size, size], reader.kernel), linear(d, None, reader.kernel))
                for g, d in zip(gate_up, down, strict=True)
            ]
        else:
            old = any(f"{base}.experts.0.w1.{part}" in reader.names for part in ("weight", "weight_packed", "qweight"))
            gate, up, out = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
            made = [
                Mlp(
                    reader.join([f"{p}.{gate}", f"{p}.{up}"], [size, size], a.hidden),
                    reader.linear(f"{p}.{out}", (a.hidden, size)),
                )
                for p in (f"{base}.experts.{i}" for i in range(experts.count))
            ]
        return Mixture(router, tuple(made), experts.per_token, experts.renormalize)
    raise UserError(
        f"{reader.checkpoint.path.name}: tensor {prefix}.mlp.gate.weight is missing; the checkpoint is incomplete"
    )
