"""What the decoders that are composed in Python share (decoder.py, gpu/decoder.py): their weights and what follows."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from runtime.blocks import Block, Linear, Mlp, Parts
from runtime.family import Architecture
from runtime.kernels.dispatch import Kernel
from runtime.kv_kind import UNCALIBRATED, CacheScheme
from runtime.rotary import RotaryTable
from runtime.upper import upper_parts, weight_bytes


class Assembled:
    """A decoder's weights, and the facts that rows.Decoder asks for."""

    def __init__(
        self,
        architecture: Architecture,
        config: Any,
        embedding: Tensor,
        blocks: tuple[Block, ...],
        norm: Tensor,
        head: Linear,
        kernel: Kernel,
        kv: CacheScheme = UNCALIBRATED,
    ):
        self.architecture = architecture
        self.vocab_size, self.hidden_size = architecture.vocab, architecture.hidden
        self.max_positions, self.exact, self.device = architecture.max_positions, kernel.exact, embedding.device
        self.kernels, self.kv = kernel.name, kv
        self.embedding, self.parts = embedding, Parts(embedding, blocks, norm, head)
        self._config, self._kernel = config, kernel
        self._rotary = RotaryTable(config, self.device)

    @property
    def threads(self) -> int:
        """torch's: what uses threads of these kernels uses those."""
        return torch.get_num_threads()

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that the weights take."""
        return weight_bytes(self.parts)

    def upper(self) -> Self:
        """This decoder on the upper planes of its int8 weights (upper.py): no weights of its own, caches of its own.

        Raises UserError where it was not loaded with planes.
        """
        p = upper_parts(self.parts)
        a = self.architecture
        return type(self)(a, self._config, self.embedding, p.blocks, p.norm, p.head, self._kernel, self.kv)


def sum_of_experts(
    x: Tensor, shares: Tensor, chosen: Tensor, experts: Sequence[Mlp], run: Callable[[Tensor, Mlp], Tensor]
) -> Tensor:
    """Each row's experts of x (T, hidden) times their shares (T, k), added in order of their number; float32.

    chosen (T, k) int64: experts' numbers, below 0: none. run: an expert's output of some rows. Waits for the device.
    """
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        at, place = (chosen == number).nonzero(as_tuple=True)
        if len(at):
            out[at] = out[at] + run(x[at], expert) * shares[at, place].unsqueeze(-1)
    return out
