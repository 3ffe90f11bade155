"""What stands in attention's place and carries a state, in plain torch: each row from the state after its parent.

A row's own state goes to its slot. The meaning of the native kernels', bit for bit (native/convolution_layer.cpp,
native/delta_layer.cpp, native/mamba_layer.cpp).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.cache.contiguous import KeyValueCache
from runtime.cache.slots import Layout
from runtime.checkpoints.mixers import DeltaNet, Mamba
from runtime.kernels import delta, mamba, reference
from runtime.kernels.activations import silu
from runtime.kernels.convolution import convolve
from runtime.kernels.exact import sigmoid
from runtime.model.state_layers import DeltaRule, ShortConvolution, StateSpace


def _walk(layout: Layout, cache: KeyValueCache, place: int, size: int, step: Callable[[int, Tensor], Tensor]) -> None:
    """state = step(row, state before it), of `size` floats from `place` on, for each row in order."""
    for of in layout.requests:
        states = cache.states(of.request)
        assert states is not None
        for row in range(of.count):
            made = step(of.first + row, states.load(of.before(row), place, size))
            states.save(of.start + row, place, made)


def short_convolution(x: Tensor, weights: ShortConvolution, place: int, layout: Layout, cache: KeyValueCache) -> Tensor:
    """What a short convolution adds, of normed rows x (T, hidden)."""
    gate, second, value = weights.qkv.split(x)
    inputs, past = gate * value, weights.taps[1:]
    out = torch.empty_like(inputs)

    def step(row: int, before: Tensor) -> Tensor:
        out[row], after = convolve(before.view_as(past), inputs[row], weights.taps, weights.bias)
        return after.flatten()

    _walk(layout, cache, place, past.numel(), step)
    return weights.out(second * out)


def delta_rule(
    x: Tensor, weights: DeltaRule, how: DeltaNet, eps: float, place: int, layout: Layout, cache: KeyValueCache
) -> Tensor:
    """What a gated delta rule adds, of normed rows x (T, hidden); eps: of the norm of a head's output."""
    rows, heads, keys = len(x), how.value_heads, how.key_heads * how.key
    whole = torch.cat(weights.qkv.split(x), dim=1)
    inputs, gates, share, left = whole.split([how.channels, how.values, heads, heads], dim=1)
    share, left = sigmoid(share), delta.decay(left, weights.step, weights.rate)
    past, out = weights.taps[1:], torch.empty((rows, heads, how.value), device=x.device)

    def step(row: int, before: Tensor) -> Tensor:
        seen, matrices = before.split([past.numel(), how.values * how.key])
        made, seen = convolve(seen.view_as(past), inputs[row], weights.taps, None)
        q, k, v = silu(made).split([keys, keys, how.values])
        q, k = (
            reference.rms_norm(part.view(how.key_heads, how.key), weight, 1e-6 / how.key).repeat_interleave(
                heads // how.key_heads, dim=0
            )
            for part, weight in ((q, weights.query), (k, weights.key))
        )
        found = matrices.view(heads, how.key, how.value), q, k, v.view(heads, how.value)
        out[row], after = delta.step(*found, left[row], share[row])
        return torch.cat((seen.flatten(), after.flatten()))

    _walk(layout, cache, place, how.floats, step)
    normed = reference.rms_norm(out, weights.norm, eps)
    return weights.out((silu(gates.reshape(normed.shape)) * normed).flatten(1))


def state_space(
    x: Tensor, weights: StateSpace, how: Mamba, eps: float, place: int, layout: Layout, cache: KeyValueCache
) -> Tensor:
    """What a state space adds, of normed rows x (T, hidden); eps: of the norm of its outputs."""
    heads, vectors, each = how.heads, (how.groups, how.state), how.heads // how.groups
    made = weights.into(x if how.read == 1.0 else x * how.read)
    made = made if weights.multipliers is None else made * weights.multipliers
    gates, inputs, times = made.split([how.values, how.channels, heads], dim=1)
    times, left = mamba.steps(times, weights.step, weights.rate, how.limits)
    past, out = weights.taps[1:], torch.empty((len(x), heads, how.dim), device=x.device)

    def step(row: int, before: Tensor) -> Tensor:
        seen, matrices = before.split([past.numel(), how.values * how.state])
        found, seen = convolve(seen.view_as(past), inputs[row], weights.taps, weights.bias)
        value, b, c = silu(found).split(how.sizes[1:4])
        b, c = (part.view(vectors).repeat_interleave(each, dim=0) for part in (b, c))
        matrices, value = matrices.view(heads, how.state, how.dim), value.view(heads, how.dim)
        out[row], after = mamba.advance(matrices, value, b, c, times[row], left[row], weights.skip)
        return torch.cat((seen.flatten(), after.flatten()))

    _walk(layout, cache, place, how.floats, step)
    return weights.out(mamba.gated(out.flatten(1), gates, weights.norm, eps, how.norm == "gated"))
