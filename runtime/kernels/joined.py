"""What layers of all kernels have in common: the tensors that they hold, and layers of one input as one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

# Of any kernels: what has neither order nor static step (a float tensor) shares nothing.
Weight = TypeVar("Weight")


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


class OfWeight:
    """A layer whose tensors are those of its `weight`."""

    weight: Any

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.weight.tensors
        return found

    @property
    def nbytes(self) -> int:
        return int(self.weight.nbytes)


def share_inputs(weights: Sequence[Weight]) -> list[Weight]:
    """The weights, equal input orders and equal static steps being one tensor: kernels round x once for those."""
    out: list[Weight] = []
    for weight in weights:
        for name in ("perm", "input_scale"):
            own = getattr(weight, name, None)
            for other in out:
                theirs = getattr(other, name, None)
                if own is not None and theirs is not None and own.dtype == theirs.dtype and torch.equal(own, theirs):
                    weight = replace(weight, **{name: theirs})  # type: ignore[type-var]
        out.append(weight)
    return out


@dataclass(frozen=True)
class Joined:
    """Layers that read the same input, in one product where their schemes agree: `split` returns each one's output."""

    parts: tuple[Linear, ...]
    sizes: tuple[int, ...]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """One (T, N_i) tensor per joined layer."""
        whole = self.parts[0](x) if len(self.parts) == 1 else torch.cat([part(x) for part in self.parts], dim=1)
        return whole.split(self.sizes, dim=1)
