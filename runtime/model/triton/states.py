"""Layers that carry a state, on a device: which states rows read and leave, and what the layers make of them.

A forward's inputs say where each row's states lie (row_states.Walk), so that a graph of it holds no address of theirs.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runtime.cache.slots import Reserved
from runtime.cache.states import States
from runtime.checkpoints.mixers import DeltaNet, Mamba
from runtime.kernels.triton import delta, state_space
from runtime.kernels.triton.convolution import filtered, gated_convolution
from runtime.kernels.triton.elementwise import gated, gated_norm
from runtime.kernels.triton.row_states import CARRIED, Walk
from runtime.model.state_layers import DeltaRule, ShortConvolution, StateSpace
from runtime.model.triton.cache import GpuCache


def fill_walk(
    spans: NDArray[np.int32], addresses: NDArray[np.int64], reserved: Iterable[Reserved], cache: GpuCache
) -> None:
    """Writes where the rows of `reserved`, in their order, find their states, into spans (R, 2) and addresses (T, 2).

    Both are zeros before: the other rows begin with a state of zeros, and leave none.
    """
    found, end = [], 0
    for r in reserved:
        found += [(end, r.first - end), (r.first, r.count)]
        end = r.first + r.count
        states = cache.states(r.request)
        assert states is not None
        addresses[r.first : end] = _addresses(r, states)
    found = [(first, count) for first, count in [*found, (end, len(addresses) - end)] if count]
    spans[: len(found)] = found


def _addresses(r: Reserved, states: States) -> NDArray[np.int64]:
    """Of a request's rows, (count, 2) as Walk has them; of a chain only the last states that are held are left."""
    rows = np.arange(r.count)
    above = rows - 1 if r.parents is None else np.asarray(r.parents)
    before = np.where(above >= 0, above, -1) + r.start
    out = np.stack((np.where(before < 0, 0, places_of(before, states)), places_of(rows + r.start, states)), axis=1)
    out[1:, 0][above[1:] == rows[:-1]] = CARRIED
    if r.parents is None:
        out[: max(0, r.count - len(states.memory)), 1] = 0
    return out


def places_of(slots: NDArray[np.int64], states: States) -> NDArray[np.int64]:
    """Addresses (n,) of the states after some slots (n,)."""
    address, held, floats, _ = states.pointers
    return address + slots % held * (states.memory.itemsize * floats)


def short_convolution(parts: Sequence[Tensor], weights: ShortConvolution, walk: Walk, place: int) -> Tensor:
    """What `out` reads, (T, channels), of gate, second gate and value, (T, channels) each."""
    gate, second, value = parts
    return gated_convolution(gate, second, value, weights.taps, weights.bias, walk, place)


def delta_rule(
    parts: Sequence[Tensor], weights: DeltaRule, how: DeltaNet, eps: float, walk: Walk, place: int
) -> Tensor:
    """What `out` reads, (T, values), of what the layers of `qkv` make; eps: of the norm of a head's output."""
    inputs, gates, share, left = _cut(parts, (how.channels, how.values, how.value_heads, how.value_heads))
    made = filtered(inputs, weights.taps, None, walk, place)
    vectors = weights.step, weights.rate, weights.query, weights.key
    matrices = place + (how.taps - 1) * how.channels
    out = delta.delta_rule(made, share, left, vectors, how.key_heads, how.value, walk, matrices).flatten(1)
    return gated_norm(out, gates, weights.norm.view(1, -1), eps, gate_first=False)


def space(made: Tensor, weights: StateSpace, how: Mamba, eps: float, walk: Walk, place: int) -> Tensor:
    """What `out` reads, (T, values), of what `into` makes; eps: of the norm of its outputs."""
    made = made if weights.multipliers is None else made * weights.multipliers
    gates, inputs, times = made.split([how.values, how.channels, how.heads], dim=1)
    found = filtered(inputs, weights.taps, weights.bias, walk, place)
    vectors, matrices = (weights.step, weights.rate, weights.skip), place + (how.taps - 1) * how.channels
    out = state_space.state_space(found, times, vectors, how.limits, how.groups, how.state, walk, matrices)
    if weights.norm is None:
        return gated(gates, out, "silu")
    return gated_norm(out, gates, weights.norm, eps, how.norm == "gated")


def _cut(parts: Iterable[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Views of so many columns each, of which every part holds one or several whole ones."""
    out: list[Tensor] = []
    for part in parts:
        begin = 0
        while begin < part.shape[1]:
            end = begin + sizes[len(out)]
            out.append(part[:, begin:end])
            begin = end
    return out
