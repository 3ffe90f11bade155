"""What layers of all kernels have in common: the tensors that they hold, and layers of one input as one."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Linear(Protocol):
    """A layer y (T, N) = x (T, K) Wᵀ (+ b), float32, on any kernels."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""

    def __call__(self, x: Tensor) -> Tensor: ...


class HoldsTensors:
    """A layer or weight whose tensors are fields of its own."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        return tuple(value for value in vars(self).values() if isinstance(value, Tensor))

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Joined:
    """Layers that read the same input, in one product where their schemes agree: `split` returns each one's output."""

    parts: tuple[Linear, ...]
    sizes: tuple[int, ...]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """One (T, N_i) tensor per joined layer."""
        whole = self.parts[0](x) if len(self.parts) == 1 else torch.cat([part(x) for part in self.parts], dim=1)
        return whole.split(self.sizes, dim=1)
