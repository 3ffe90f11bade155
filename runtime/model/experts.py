"""The experts of a mixture over the rows that chose them, in plain torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.model.layers import Mixture, Mlp


def sum_of_experts(
    x: Tensor, shares: Tensor, chosen: Tensor, weights: Mixture, run: Callable[[Tensor, Mlp], Tensor]
) -> Tensor:
    """Each row's experts of x (T, hidden) times their shares (T, k), added in order of their number; float32.

    chosen (T, k) int64: experts' numbers, below 0: none. run: an expert's output of some rows. Waits for the device.
    """
    out = torch.zeros_like(x)
    for number, expert in enumerate(weights.experts):
        at, place = (chosen == number).nonzero(as_tuple=True)
        if len(at):
            share = shares[at, place].unsqueeze(-1)
            made = run(x[at] * share, expert) if weights.how.scaled_inputs else run(x[at], expert) * share
            out[at] = out[at] + made
    return out
