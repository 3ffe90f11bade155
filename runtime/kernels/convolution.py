"""A short convolution over the rows of a text, row by row: what its state is, and what a row makes of it."""

import torch
from torch import Tensor

from runtime.kernels.exact import ordered_sum


def convolve(past: Tensor, row: Tensor, taps: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """A row's output (channels,), and the state behind it.

    past  (taps − 1, channels), the inputs before the row, the oldest first; taps (taps, channels).

    The oldest input's product comes first in the sum, and the bias last.
    """
    seen = torch.cat((past, row.unsqueeze(0)))
    total = ordered_sum(seen * taps)
    return total if bias is None else total + bias, seen[1:]
