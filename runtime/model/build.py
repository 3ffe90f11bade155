"""From a checkpoint to a decoder: its weights packed for the kernels that run, block by block."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from runtime.cache import scheme
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.record import Architecture, Experts
from runtime.contract import Decoder
from runtime.errors import UserError
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import KINDS
from runtime.kernels.dispatch import Kernel, join, linear
from runtime.kernels.joined import Joined, Linear
from runtime.model.layers import Attention, Block, Mixture, Mlp, Norm, Parts, has_planes, require_used
from runtime.model.rotary import RotaryTables

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
    reader = _Reader(checkpoint, kernel, device, planes, a)
    shape = (a.vocab, a.hidden)
    names = a.names
    table = reader.table(f"{names.embedding}.weight", shape)
    embedding: Tensor | None = table
    if backend.repacks:
        # A tied model's table lies in the head's blocks. Another is copied now, so that its file's pages can go.
        embedding = None if a.tied else table.clone()
    rotary = RotaryTables(config, a, device)
    blocks = tuple(_block(reader, a, number, rotary) for number in range(a.layers))
    norm = reader.norm(names.norm)
    assert norm is not None
    head = linear(table if a.tied else reader.weight(names.head, shape), reader.bias(names.head, a.vocab), kernel)
    parts = Parts(embedding, blocks, norm, head, _positions(reader, a))
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

    def __init__(self, checkpoint: Checkpoint, kernel: Kernel, device: torch.device, planes: bool, a: Architecture):
        self.checkpoint, self.kernel, self.device, self.planes, self.a = checkpoint, kernel, device, planes, a
        self.names = frozenset(checkpoint.names())

    def weight(self, prefix: str, shape: tuple[int, int]) -> Weight:
        """The (N, K) weight of a linear layer, packed or float."""
        found = self.checkpoint.weight(prefix, unpack=not self.kernel.backend.repacks)
        if self.a.transposed and isinstance(found, Tensor):
            found = found.t().contiguous()
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

    def norm(self, name: str | None, *, heads: int = 0) -> Norm | None:
        """A norm by its name, its offset added; None for none. Of queries or keys if there are heads."""
        if name is None:
            return None
        size = self.a.hidden
        if heads:
            size = heads * self.a.head_dim if self.a.query_key_span == "heads" else self.a.head_dim
        weight = self.vector(f"{name}.weight", size)
        return Norm(weight + self.a.norm_offset if self.a.norm_offset else weight, self.bias(name, size))

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

    def join(
        self, prefixes: Sequence[str], sizes: Sequence[int], inputs: int, orders: Sequence[Tensor | None] = ()
    ) -> Joined:
        """Several layers of one input; one prefix with several sizes is a layer fused on disk.

        orders  of each prefix, in which order its rows are taken (None: as they are).
        """
        outputs = [sum(sizes)] if len(prefixes) == 1 else sizes
        weights: list[Weight] = []
        biases: list[Tensor | None] = []
        for prefix, size, order in zip(prefixes, outputs, orders or [None] * len(prefixes), strict=True):
            weights.append(_rows(self.weight(prefix, (size, inputs)), order))
            bias = self.bias(prefix, size)
            biases.append(bias if bias is None or order is None else bias[order])
        return join(weights, biases, list(sizes), self.kernel)

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


def _rows(weight: Weight, order: Tensor | None) -> Weight:
    """The weight's rows in another order."""
    if order is None:
        return weight
    if isinstance(weight, Tensor):
        return weight[order]
    of_rows = ("codes", "scale", "offset", "bias")
    moved = {key: part[order] for key in of_rows if (part := getattr(weight, key)) is not None}
    return replace(weight, **moved)


def _positions(reader: _Reader, a: Architecture) -> Tensor | None:
    if a.names.positions is None:
        return None
    whole = reader.table(f"{a.names.positions}.weight", (a.max_positions + a.first_position, a.hidden))
    return whole[a.first_position :].float().contiguous()


def _halves(heads: int, dim: int, rotated: int) -> Tensor:
    """The order in which rows of heads are taken where neighbours rotate together: halves do then, which is what the
    kernels have, and scores are the same."""
    order = torch.arange(dim)
    order = torch.cat((order[:rotated:2], order[1:rotated:2], order[rotated:]))
    return (torch.arange(heads).unsqueeze(1) * dim + order).flatten()


def _ungrouped(a: Architecture) -> Tensor:
    """The order in which rows that stand key head by key head are all queries, all keys, all values."""
    per = a.heads // a.kv_heads
    rows = torch.arange((a.heads + 2 * a.kv_heads) * a.head_dim).view(a.kv_heads, per + 2, a.head_dim)
    return torch.cat([part.flatten() for part in (rows[:, :per], rows[:, per], rows[:, per + 1])])


def _attention(reader: _Reader, a: Architecture, prefix: str, number: int, rotary: RotaryTables) -> Attention:
    names, heads, kv = a.names, a.heads * a.head_dim, a.kv_heads * a.head_dim
    orders: list[Tensor | None] = [None] * len(names.qkv)
    if a.rotary_neighbours:
        orders[:2] = [_halves(count, a.head_dim, rotary.width) for count in (a.heads, a.kv_heads)]
    if a.grouped_rows:
        orders = [_ungrouped(a)]
    query, key = (
        _head_norm(reader, a, f"{prefix}.{name}", count, rotary.width) if a.query_key_norm else None
        for name, count in ((names.query_norm, a.heads), (names.key_norm, a.kv_heads))
    )
    return Attention(
        qkv=reader.join([f"{prefix}.{name}" for name in names.qkv], [heads, kv, kv], a.hidden, orders),
        out=reader.linear(f"{prefix}.{names.out}", (a.hidden, heads)),
        q_norm=query,
        k_norm=key,
        window=a.windows[number],
        sinks=reader.vector(f"{prefix}.{names.sinks}", a.heads) if a.sinks else None,
        rotary=rotary.of[number],
    )


def _head_norm(reader: _Reader, a: Architecture, name: str, heads: int, rotated: int) -> Tensor:
    """The weight of queries' or keys' norm, in the order of their rows."""
    if a.query_key_span == "each head":
        found = [reader.norm(name.format(head), heads=heads) for head in range(heads)]
        weight = torch.stack([norm.weight for norm in found if norm is not None])
    else:
        norm = reader.norm(name, heads=heads)
        assert norm is not None
        weight = norm.weight
    if not a.rotary_neighbours:
        return weight
    return weight.flatten()[_halves(weight.numel() // a.head_dim, a.head_dim, rotated)].view(weight.shape)


def _block(reader: _Reader, a: Architecture, number: int, rotary: RotaryTables) -> Block:
    prefix, names = a.names.block.format(number), a.names

    def norm(name: str | None) -> Norm | None:
        return reader.norm(None if name is None else f"{prefix}.{name}")

    dense = a.experts is None or number in a.dense_layers
    return Block(
        input_norm=norm(names.input_norm),
        attention=_attention(reader, a, prefix, number, rotary),
        mlp_norm=norm(names.mlp_norm),
        mlp=_mlp(reader, a, prefix, a.intermediate) if dense else _stacked(_mixture(reader, a, prefix), reader.kernel),
        attention_norm=norm(names.attention_norm),
        output_norm=norm(names.output_norm),
    )


def _stacked(mixture: Mixture, kernel: Kernel) -> Mixture:
    """The mixture as the kernels want it; block by block, so that only one is held twice while it is moved."""
    stack = kernel.backend.stack
    if not stack or not kernel.exact or mixture.experts[0].parameters is not None:
        return mixture
    made: Mixture = resolve_name(stack)(mixture)
    return made


def _mlp(reader: _Reader, a: Architecture, prefix: str, size: int) -> Mlp:
    return Mlp(
        gate_up=reader.join([f"{prefix}.{name}" for name in a.names.gate_up], [size] * (2 if a.gated else 1), a.hidden),
        down=reader.linear(f"{prefix}.{a.names.down}", (a.hidden, size)),
        parameters=_xielu(reader, f"{prefix}.mlp.act_fn") if a.activation == "xielu" else None,
    )


def _xielu(reader: _Reader, prefix: str) -> Tensor:
    """What reference.xielu takes, of what a checkpoint holds: αₚ and αₙ before softplus, β and ε."""
    positive, negative = (reader.table(f"{prefix}.alpha_{part}", (1,)).double() for part in "pn")
    beta, start = (
        reader.table(f"{prefix}.{name}", ()).double() if f"{prefix}.{name}" in reader.names else torch.tensor(value)
        for name, value in (("beta", 0.5), ("eps", -1e-6))
    )
    softplus = torch.nn.functional.softplus
    found = (softplus(positive), beta + softplus(negative), beta.view(1), start.view(1))
    return torch.cat([part.float().to(reader.device) for part in found])


def _mixture(reader: _Reader, a: Architecture, prefix: str) -> Mixture:
    """Experts fused in two tensors, or one by one as older files have them."""
    experts = a.experts
    assert experts is not None
    places = [(f"{prefix}.{name}", router) for name in experts.names for router in experts.routers]
    found = next((place for place in places if f"{'.'.join(place)}.weight" in reader.names), None)
    if found is None:
        raise UserError(
            f"{reader.checkpoint.path.name}: tensor {'.'.join(places[0])}.weight is missing; the checkpoint is"
            " incomplete"
        )
    base, router = found
    shared = f"{base}.{experts.shared_name}"
    return Mixture(
        reader.linear(f"{base}.{router}", (experts.count, a.hidden)),
        _experts(reader, a, experts, base),
        experts.per_token,
        experts.renormalize,
        scoring=experts.scoring,
        correction=reader.vector(f"{base}.{experts.correction}", experts.count) if experts.correction else None,
        scale=experts.scale,
        shared=_expert(reader, a, shared, experts.shared, ("gate_proj", "up_proj", "down_proj"))
        if experts.shared
        else None,
        shared_gate=reader.linear(f"{base}.{experts.shared_gate}", (1, a.hidden)) if experts.shared_gate else None,
    )


def _expert(reader: _Reader, a: Architecture, prefix: str, size: int, names: tuple[str, str, str]) -> Mlp:
    gate, up, down = (f"{prefix}.{name}" for name in names)
    return Mlp(reader.join([gate, up], [size, size], a.hidden), reader.linear(down, (a.hidden, size)))


def _experts(reader: _Reader, a: Architecture, experts: Experts, base: str) -> tuple[Mlp, ...]:
    size, kernel = experts.hidden, reader.kernel
    fused = next((pair for pair in experts.fused if f"{base}.{pair[0]}" in reader.names), None)
    if fused is None:
        old = any(f"{base}.experts.0.w1.{part}" in reader.names for part in ("weight", "weight_packed", "qweight"))
        names = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
        return tuple(_expert(reader, a, f"{base}.experts.{i}", size, names) for i in range(experts.count))
    order = None
    if experts.interleaved:
        order = torch.arange(2 * size).view(size, 2).t().flatten()
    limits = None if experts.clamp is None else torch.tensor(experts.clamp, device=reader.device)
    layers = zip(
        *_stack(reader, experts, f"{base}.{fused[0]}"), *_stack(reader, experts, f"{base}.{fused[1]}"), strict=True
    )
    return tuple(
        Mlp(
            join(
                [_rows(wide, order)],
                [bias if bias is None or order is None else bias[order]],
                [size, size],
                kernel,
            ),
            linear(narrow, own, kernel),
            limits,
        )
        for wide, bias, narrow, own in layers
    )


def _stack(reader: _Reader, experts: Experts, name: str) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights (N, K) and biases of one layer of every expert."""
    weights = reader.stack(name)
    if experts.transposed:
        weights = weights.transpose(1, 2)
    if f"{name}_bias" not in reader.names:
        return list(weights), [None] * experts.count
    return list(weights), list(reader.table(f"{name}_bias", tuple(weights.shape[:2])).float())
