"""The experts of a mixture as stacks of weights, from which the device takes those that a row picked.

A stack is made once, when a mixture is loaded; the layers of single experts, which prompts go through, are views of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from runtime.checkpoints.record import Activation
from runtime.kernels.activations import activate
from runtime.kernels.triton.elementwise import Activation as Fused
from runtime.kernels.triton.elementwise import gated
from runtime.kernels.triton.expert_rows import Picks, add_experts_kernel
from runtime.kernels.triton.linear import TritonJoined, TritonLinear, split_outputs, triton_linear
from runtime.kernels.triton.quantize_inputs import OPTIONS, Rounding, gated_quantize, quantize, rounding
from runtime.model.layers import Mixture, Mlp

# Numbers of a row that one program adds.
_BLOCK = 512
# Tensors of a weight that experts have in one stack.
_STACKED = ("codes", "lower", "scale", "offset", "bias")


@dataclass(frozen=True, eq=False)
class StackedLinear:
    """One layer of each of E experts: y (pairs, N) = x Wᵀ (+ b), float32, W being the expert's of the pair.

    layer      over a weight of which every tensor is a stack: codes (E, N, …), scale and offset (E, columns, N), bias
               (E, N); where `by_expert`, perm (E, K) and input_scale (E,).
    by_expert  inputs are rounded as the expert wants them, which is not the same for all.
    """

    layer: TritonLinear
    by_expert: bool

    def __call__(self, x: Tensor, picks: Picks) -> Tensor:
        """x (T, K), or (pairs, K), float32."""
        rounded = x if self.layer.how is None else quantize(x, self.layer.how, self._rounding(picks))
        return self.layer.product(rounded, picks=picks)

    def after(self, gate: Tensor, up: Tensor, activation: Fused, picks: Picks) -> Tensor:
        """The product with act(gate) · up, each (pairs, K) float32 with rows of stride 1."""
        if self.layer.how is None:
            return self(gated(gate, up, activation), picks)
        rounded = gated_quantize(gate, up, activation, self.layer.how, self._rounding(picks))
        return self.layer.product(rounded, picks=picks)

    def upper(self) -> "StackedLinear":
        """The layer on the upper planes of its weights; one without planes as it is."""
        return replace(self, layer=self.layer.upper()) if self.layer.has_planes else self

    def _rounding(self, picks: Picks) -> Picks | None:
        return picks if self.by_expert else None


@dataclass(frozen=True, eq=False)
class StackedExperts:
    """All experts of a mixture, each down(act(gate(x)) · up(x)).

    gate_up  one layer, or several that do not read their inputs alike; sizes: outputs of gate and up.
    how      the rounding that all of gate_up take x by, where it is the same for all experts.
    parameters  float32, of an activation that has some, the same for all experts.
    """

    gate_up: tuple[StackedLinear, ...]
    sizes: tuple[int, ...]
    down: StackedLinear
    how: Rounding | None
    parameters: Tensor | None = None

    def mixed(self, x: Tensor, shares: Tensor, picks: Picks, activation: Activation, residual: Tensor) -> Tensor:
        """residual (T, H) + each row's experts of x (T, H) times their shares (T, count), all float32.

        The bits are those of the experts' own layers, added in order of their number. Nothing waits for the device.
        """
        if self.how is None:
            outputs = tuple(layer(x, picks) for layer in self.gate_up)
        else:
            rounded = quantize(x, self.how)
            outputs = tuple(layer.layer.product(rounded, picks=picks) for layer in self.gate_up)
        gate, *up = split_outputs(outputs, self.sizes)
        if up and activation in ("silu", "gelu_tanh"):
            made = self.down.after(gate, up[0], activation, picks)
        else:
            made = self.down(activate(activation, gate, up[0] if up else None, self.parameters), picks)
        return add_experts(made, shares, picks, residual)

    def upper(self) -> "StackedExperts":
        """The same on the upper planes of int8 weights."""
        return replace(self, gate_up=tuple(layer.upper() for layer in self.gate_up), down=self.down.upper())


def add_experts(found: Tensor, shares: Tensor, picks: Picks, residual: Tensor) -> Tensor:
    """residual (T, H) + the pairs' outputs (pairs, H) times their shares (T, count), in order of the experts' numbers.

    All float32 and contiguous.
    """
    rows, width = residual.shape
    out = torch.empty_like(residual)
    if rows:
        add_experts_kernel[(triton.cdiv(width, _BLOCK), rows)](
            *(found, shares, picks.experts, residual, out, rows, width), COUNT=picks.count, BLOCK=_BLOCK, **OPTIONS
        )
    return out


def stacked(mixture: Mixture) -> Mixture:
    """The mixture with its experts as stacks beside views of them.

    As it is where they are not alike (different schemes, some with zero points and some without, activations of other
    parameters), or run on a library's product: nothing is lost but speed, because the host sends rows to such experts.
    """
    parameters = [expert.parameters for expert in mixture.experts]
    ups = [expert.gate_up for expert in mixture.experts]
    if not _equal(parameters) or not all(
        isinstance(up, TritonJoined) and len(up.parts) == len(ups[0].parts) for up in ups
    ):
        return mixture
    there = [[up.parts[i] for up in ups] for i in range(len(ups[0].parts))]
    there.append([expert.down for expert in mixture.experts])
    columns = [[layer for layer in column if isinstance(layer, TritonLinear)] for column in there]
    if not all(len(column) == len(ups) and alike(column) for column in columns):
        return mixture
    made = [stack(column) for column in columns]
    experts = tuple(
        Mlp(replace(up, parts=tuple(parts)), last, parameters[0])
        for up, *parts, last in zip(ups, *(views for _, views in made), strict=True)
    )
    *gate_up, down = (layer for layer, _ in made)
    by_expert = any(layer.by_expert for layer in gate_up)
    one = None if by_expert else rounding(*(layer.layer.weight for layer in gate_up))
    whole = StackedExperts(tuple(gate_up), ups[0].sizes, down, one, parameters[0])
    return replace(mixture, experts=experts, stacked=whole)


def alike(layers: Sequence[TritonLinear]) -> bool:
    """Whether layers differ in their numbers alone, so that `stack` takes them."""

    def known(layer: TritonLinear) -> tuple[object, ...]:
        w = layer.weight
        missing = tuple(t is None for t in (w.lower, w.scale, w.offset, w.perm, w.bias, w.input_scale))
        return w.kind, w.shape, w.cut, w.codes.dtype, layer.plan, layer.splits, missing

    return all(known(layer) == known(layers[0]) for layer in layers)


def stack(layers: Sequence[TritonLinear]) -> tuple[StackedLinear, list[TritonLinear]]:
    """The stack of layers that are alike, and the layers as views of it.

    Orders and static steps are small and stay the layers' own, which may share them with each other.
    """
    weights = [layer.weight for layer in layers]
    stacks: dict[str, Any] = {name: _maybe([getattr(w, name) for w in weights]) for name in _STACKED}
    whole = replace(weights[0], **stacks)
    views = []
    for i, layer in enumerate(layers):
        own: dict[str, Any] = {name: None if part is None else part[i] for name, part in stacks.items()}
        views.append(replace(layer, weight=replace(layer.weight, levels=whole.levels, **own)))
    perms, steps = [w.perm for w in weights], [w.input_scale for w in weights]
    by_expert = not (_equal(perms) and _equal(steps))
    if by_expert:
        static = _maybe(steps)
        whole = replace(whole, perm=_maybe(perms), input_scale=None if static is None else static.flatten())
    return StackedLinear(triton_linear(whole, layers[0].plan, layers[0].splits), by_expert), views


def _equal(tensors: Sequence[Tensor | None]) -> bool:
    first = tensors[0]
    return first is None or all(other is not None and torch.equal(other, first) for other in tensors)


def _maybe(tensors: Sequence[Tensor | None]) -> Tensor | None:
    there = [tensor for tensor in tensors if tensor is not None]
    return _whole(there) if there else None


def _whole(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one with a dimension more: the memory that they are slices of, or else a copy."""
    first = tensors[0]
    size, storage = first.nbytes, first.untyped_storage().data_ptr()
    adjacent = all(
        tensor.is_contiguous()
        and tensor.untyped_storage().data_ptr() == storage
        and tensor.data_ptr() == first.data_ptr() + number * size
        for number, tensor in enumerate(tensors)
    )
    if adjacent:
        shape = (len(tensors), *first.shape)
        return first.as_strided(shape, (first.numel(), *first.stride()))
    return torch.stack(list(tensors))
