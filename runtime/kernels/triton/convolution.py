"""Convolutions over the rows of a text (kernels/convolution.py), between two gates or before SiLU: its bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.exact import silu
from runtime.kernels.triton.quantize_inputs import OPTIONS
from runtime.kernels.triton.row_states import Walk, follows_another, read_state, write_state

# Channels of one program.
_CHANNELS = 128


def gated_convolution(
    gate: Tensor, second: Tensor, value: Tensor, taps: Tensor, bias: Tensor | None, walk: Walk, place: int
) -> Tensor:
    """second · (the convolution of gate · value), (T, channels) float32; rows of any one stride.

    taps (taps, channels) float32, 2 or more, the oldest input's first; bias (channels,). place: of a token's floats the
    first of this layer's state, its last taps − 1 inputs, the oldest first.
    """
    return _launch((gate, second, value), taps, bias, walk, place)


def filtered(x: Tensor, taps: Tensor, bias: Tensor | None, walk: Walk, place: int) -> Tensor:
    """SiLU of the convolution of x, (T, channels) float32; the rest as for `gated_convolution`."""
    return _launch((x, x, x), taps, bias, walk, place, alone=True)


def _launch(
    inputs: tuple[Tensor, Tensor, Tensor],
    taps: Tensor,
    bias: Tensor | None,
    walk: Walk,
    place: int,
    alone: bool = False,
) -> Tensor:
    rows, channels = inputs[0].shape
    out = torch.empty((rows, channels), dtype=torch.float32, device=taps.device)
    if rows:
        _convolution_kernel[(triton.cdiv(channels, _CHANNELS), len(walk.spans))](
            *inputs, out, taps, bias, walk.spans, walk.addresses, place, inputs[0].stride(0), channels,
            PAST=len(taps) - 1, ALONE=alone, CHANNELS=_CHANNELS, HALVES=walk.halves, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return out


@triton.jit
def _shifted(seen, last):
    """A tuple without its first, and with another last one."""
    return seen[1:] + (last,)  # noqa: RUF005 - kernels do not unpack


@triton.jit(do_not_specialize=["place"])
def _convolution_kernel(
    gate, second, value, out, taps, bias, spans, addresses, place, stride, channels,
    PAST: tl.constexpr, ALONE: tl.constexpr, CHANNELS: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(1)
    at = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = at < channels
    first, count = tl.load(spans + 2 * request).to(tl.int64), tl.load(spans + 2 * request + 1)
    seen = (tl.zeros((CHANNELS,), tl.float32),) * PAST
    for i in range(count):
        row = first + i
        before, after = tl.load(addresses + 2 * row), tl.load(addresses + 2 * row + 1)
        if follows_another(before):
            for n in tl.static_range(PAST):
                seen = _shifted(seen, read_state(before, place, n * channels + at, inside, HALVES))
        from_row = row * stride + at
        given = tl.load(value + from_row, mask=inside, other=0.0)
        if not ALONE:
            given = tl.load(gate + from_row, mask=inside, other=0.0) * given
        total = seen[0] * tl.load(taps + at, mask=inside, other=0.0)
        for n in tl.static_range(1, PAST):
            total = total + seen[n] * tl.load(taps + n * channels + at, mask=inside, other=0.0)
        total = total + given * tl.load(taps + PAST * channels + at, mask=inside, other=0.0)
        if bias is not None:
            total = total + tl.load(bias + at, mask=inside, other=0.0)
        made = silu(total) if ALONE else tl.load(second + from_row, mask=inside, other=0.0) * total
        tl.store(out + row * channels + at, made, mask=inside)
        left = seen
        seen = _shifted(seen, given)
        for n in tl.static_range(PAST):
            left = _shifted(left, write_state(after, place, n * channels + at, seen[n], inside, HALVES))
        seen = left
