"""Layers of one input as one: what dispatch.py makes, on any kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Joined:
    """Layers that read the same input, in one product where their schemes agree: `split` returns each one's output."""

    parts: tuple[Callable[[Tensor], Tensor], ...]
    sizes: tuple[int, ...]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """One (T, N_i) tensor per joined layer."""
        whole = self.parts[0](x) if len(self.parts) == 1 else torch.cat([part(x) for part in self.parts], dim=1)
        return whole.split(self.sizes, dim=1)
