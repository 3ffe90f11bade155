"""From a checkpoint to what a block has in attention's place: a short convolution, a delta rule, or a state space."""

import torch
from torch import Tensor

from runtime.checkpoints.mixers import DeltaNet
from runtime.checkpoints.record import Architecture
from runtime.kernels.exact import exp
from runtime.model.state_layers import DeltaRule, ShortConvolution, StateSpace
from runtime.model.tensor_reader import TensorReader


def short_convolution(reader: TensorReader, a: Architecture, prefix: str) -> ShortConvolution:
    """The convolution of the block `prefix`, of as many channels as the model is wide."""
    how, channels = a.convolution, a.hidden
    assert how is not None
    filtered = f"{prefix}.{how.filter}"
    return ShortConvolution(
        qkv=reader.join([f"{prefix}.{how.into}"], [channels] * 3, channels),
        out=reader.linear(f"{prefix}.{how.out}", (channels, channels)),
        taps=_taps(reader, filtered, channels, how.taps),
        bias=reader.bias(filtered, channels),
    )


def _taps(reader: TensorReader, name: str, channels: int, taps: int) -> Tensor:
    weight = reader.table(f"{name}.weight", (channels, 1, taps)).float()
    return weight.view(channels, taps).t().contiguous()


def delta_rule(reader: TensorReader, a: Architecture, prefix: str) -> DeltaRule:
    """The delta rule of the block `prefix`."""
    how = a.delta
    assert how is not None
    heads, sizes = how.value_heads, [how.channels, how.values, how.value_heads, how.value_heads]
    orders: list[Tensor | None] = [None] * len(how.into)
    if how.grouped:
        sizes, orders = [how.channels + how.values, 2 * heads], [*_ungrouped(how)]
    length = torch.full((how.key,), how.key**-0.5, device=reader.device)
    return DeltaRule(
        qkv=reader.join([f"{prefix}.{name}" for name in how.into], sizes, a.hidden, orders),
        out=reader.linear(f"{prefix}.{how.out}", (a.hidden, how.values)),
        taps=_taps(reader, f"{prefix}.{how.filter}", how.channels, how.taps),
        step=reader.vector(f"{prefix}.{how.step}", heads),
        rate=0.0 - exp(reader.vector(f"{prefix}.{how.rate}", heads)),
        query=torch.full((how.key,), 1.0 / how.key, device=reader.device),
        key=length,
        norm=reader.vector(f"{prefix}.{how.norm}.weight", how.value),
    )


def _ungrouped(how: DeltaNet) -> tuple[Tensor, Tensor]:
    """The order in which rows that stand key head by key head are all queries, keys, values and gates; and that of what
    each value head has one of."""
    per = how.value_heads // how.key_heads
    sizes = [how.key, how.key, per * how.value, per * how.value]
    rows = torch.arange(how.key_heads * sum(sizes)).view(how.key_heads, -1).split(sizes, dim=1)
    ones = torch.arange(2 * how.value_heads).view(how.key_heads, 2, per)
    return torch.cat([part.flatten() for part in rows]), ones.transpose(0, 1).flatten()


def state_space(reader: TensorReader, a: Architecture, prefix: str) -> StateSpace:
    """The state space of the block `prefix`."""
    how = a.mamba
    assert how is not None
    base, values, groups = f"{prefix}.{how.name}", how.values, how.groups
    multipliers = None
    if set(how.multipliers) != {1.0}:
        each = zip(how.multipliers, how.sizes, strict=True)
        multipliers = torch.cat([torch.full((size,), factor, device=reader.device) for factor, size in each])
    norm = None if how.norm == "none" else reader.vector(f"{base}.norm.weight", values).view(groups, -1)
    return StateSpace(
        into=reader.linear(f"{base}.in_proj", (sum(how.sizes), a.hidden)),
        out=reader.linear(f"{base}.out_proj", (a.hidden, values)),
        taps=_taps(reader, f"{base}.conv1d", how.channels, how.taps),
        bias=reader.bias(f"{base}.conv1d", how.channels),
        step=reader.vector(f"{base}.dt_bias", how.heads),
        rate=0.0 - exp(reader.vector(f"{base}.A_log", how.heads)),
        skip=reader.vector(f"{base}.D", how.heads),
        norm=norm,
        multipliers=multipliers,
    )
