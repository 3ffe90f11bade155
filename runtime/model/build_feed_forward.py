"""From a checkpoint to what follows attention in a block: an MLP, or a mixture of experts."""

from collections.abc import Sequence
from dataclasses import replace
from pkgutil import resolve_name

import torch
from torch import Tensor

from runtime.checkpoints.record import Architecture, Beside, Experts
from runtime.errors import UserError
from runtime.formats import mxfp4
from runtime.kernels.dispatch import Kernel, join, linear
from runtime.model.layers import Mixture, Mlp, MlpBeside, Norm
from runtime.model.tensor_reader import TensorReader, Weight, take_rows


def _stacked(mixture: Mixture, kernel: Kernel) -> Mixture:
    """The mixture as the kernels want it; block by block, so that only one is held twice while it is moved."""
    stack = kernel.backend.stack
    if not stack or not kernel.exact:
        return mixture
    made: Mixture = resolve_name(stack)(mixture)
    return made


def mlp(reader: TensorReader, a: Architecture, prefix: str, size: int) -> Mlp:
    """The MLP of `size` channels of the block `prefix`."""
    found = _layers(reader, a, prefix, size, a.names.gate_up, a.names.down)
    return found if a.activation != "xielu" else replace(found, parameters=_xielu(reader, f"{prefix}.mlp.act_fn"))


def _layers(reader: TensorReader, a: Architecture, prefix: str, size: int, gate_up: Sequence[str], down: str) -> Mlp:
    """An MLP of `size` channels, by the names of its layers below `prefix`."""
    return Mlp(
        gate_up=reader.join([f"{prefix}.{name}" for name in gate_up], [size] * (2 if a.gated else 1), a.hidden),
        down=reader.linear(f"{prefix}.{down}", (a.hidden, size)),
    )


def _xielu(reader: TensorReader, prefix: str) -> Tensor:
    """What activations.xielu takes, of what a checkpoint holds: αₚ and αₙ before softplus, β and ε."""
    positive, negative = (reader.table(f"{prefix}.alpha_{part}", (1,)).double() for part in "pn")
    beta, start = (
        reader.table(f"{prefix}.{name}", ()).double() if f"{prefix}.{name}" in reader.names else torch.tensor(value)
        for name, value in (("beta", 0.5), ("eps", -1e-6))
    )
    softplus = torch.nn.functional.softplus
    found = (softplus(positive), beta + softplus(negative), beta.view(1), start.view(1))
    return torch.cat([part.float().to(reader.device) for part in found])


def mixture(reader: TensorReader, a: Architecture, prefix: str, size: int) -> Mixture:
    """The mixture of the block `prefix`; an MLP beside it has `size` channels."""
    return _stacked(_mixture(reader, a, prefix, size), reader.kernel)


def _mixture(reader: TensorReader, a: Architecture, prefix: str, size: int) -> Mixture:
    """Experts fused in two tensors, or one by one as older files have them."""
    experts = a.experts
    assert experts is not None
    bases = [f"{prefix}.{name}" if name else prefix for name in experts.names]
    places = [(base, router) for base in bases for router in experts.routers]
    found = next((place for place in places if f"{'.'.join(place)}.weight" in reader.names), None)
    if found is None:
        raise UserError(
            f"{reader.checkpoint.path.name}: tensor {'.'.join(places[0])}.weight is missing; the checkpoint is"
            " incomplete"
        )
    base, router = found
    return Mixture(
        reader.linear(f"{base}.{router}", (experts.count, a.hidden)),
        _experts(reader, a, experts, base),
        experts,
        correction=reader.vector(f"{base}.{experts.correction}", experts.count) if experts.correction else None,
        shared=_layers(reader, a, prefix, experts.shared, experts.shared_gate_up, experts.shared_down)
        if experts.shared
        else None,
        shared_gate=reader.linear(f"{base}.{experts.shared_gate}", (1, a.hidden)) if experts.shared_gate else None,
        beside=None if experts.beside is None else _beside(reader, a, experts, experts.beside, prefix, size),
    )


def _beside(reader: TensorReader, a: Architecture, experts: Experts, how: Beside, prefix: str, size: int) -> MlpBeside:
    norms = [reader.norm(f"{prefix}.{name}") for name in (how.mlp_output_norm, how.input_norm, how.output_norm)]
    found = [norm for norm in norms if norm is not None]
    scale = reader.vector(f"{prefix}.{how.router_scale}", a.hidden) * a.hidden**-0.5
    return MlpBeside(
        mlp=mlp(reader, a, prefix, size),
        mlp_output_norm=found[0],
        router_norm=Norm(scale),
        input_norm=found[1],
        output_norm=found[2],
        expert_scale=reader.vector(f"{prefix}.{how.expert_scale}", experts.count),
    )


def _experts(reader: TensorReader, a: Architecture, experts: Experts, base: str) -> tuple[Mlp, ...]:
    size, kernel = experts.hidden, reader.kernel
    limits = None if experts.clamp is None else torch.tensor(experts.clamp, device=reader.device)
    held = {name.removesuffix("_blocks") for name in reader.names if name.startswith(f"{base}.")}
    fused = next((pair for pair in experts.fused if f"{base}.{pair[0]}" in held), None)
    if fused is None:
        old = any(f"{base}.experts.0.w1.{part}" in reader.names for part in ("weight", "weight_packed", "qweight"))
        gate, up, down = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
        gate_up = (gate, up) if a.gated else (up,)
        each = (_layers(reader, a, f"{base}.experts.{i}", size, gate_up, down) for i in range(experts.count))
        return tuple(replace(one, parameters=limits) if limits is not None else one for one in each)
    order = None
    if experts.interleaved:
        order = torch.arange(2 * size).view(size, 2).t().flatten()
    shapes = ((2 * size if a.gated else size, a.hidden), (a.hidden, size))
    first, second = (
        _stack(reader, experts, f"{base}.{name}", shape) for name, shape in zip(fused, shapes, strict=True)
    )
    layers = zip(*first, *second, strict=True)
    return tuple(
        Mlp(
            join(
                [take_rows(wide, order)],
                [bias if bias is None or order is None else bias[order]],
                [size] * (2 if a.gated else 1),
                kernel,
            ),
            linear(narrow, own, kernel),
            limits,
        )
        for wide, bias, narrow, own in layers
    )


def _stack(
    reader: TensorReader, experts: Experts, name: str, shape: tuple[int, int]
) -> tuple[list[Weight], list[Tensor | None]]:
    """Weights (N, K) = shape and biases of one layer of every expert; packed ones carry theirs."""
    if mxfp4.holds(reader.names, name):
        blocks = reader.blocks(name, experts.count)
        reader.check(f"{name}_blocks", tuple(blocks[0].shape), shape)
        return blocks, [None] * experts.count
    weights = reader.stack(name)
    if experts.transposed:
        weights = weights.transpose(1, 2)
    reader.check(name, tuple(weights.shape), (experts.count, *shape))
    if f"{name}_bias" not in reader.names:
        return list(weights), [None] * experts.count
    return list(weights), list(reader.table(f"{name}_bias", tuple(weights.shape[:2])).float())
