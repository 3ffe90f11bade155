"""The parts of a decoder as data: what both compositions of them (decoder.py, native.py) are made from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runtime.kernels.joined import Joined

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Attention:
    """qkv is one layer (fused on disk or joined at load); q_norm and k_norm are Qwen3's per-head norms."""

    qkv: Joined
    out: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None


@dataclass(frozen=True)
class Mlp:
    """down(act(gate(x)) · up(x))."""

    gate_up: Joined
    down: Linear


class Stacked(Protocol):
    """All experts of a mixture in one, on kernels that know no others than the device sends rows to."""

    def upper(self) -> "Stacked":
        """The same on the upper planes of int8 weights (upper.py)."""


@dataclass(frozen=True)
class Mixture:
    """Top-k experts by a router. `stacked`: the memory of the same experts, where the kernels have a use for it."""

    router: Linear
    experts: tuple[Mlp, ...]
    per_token: int
    renormalize: bool
    stacked: Stacked | None = None


@dataclass(frozen=True)
class Block:
    """One decoder layer."""

    input_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: Mlp | Mixture


@dataclass(frozen=True, eq=False)
class Parts:
    """All weights of a decoder. `embedding` None: its rows are the head's."""

    embedding: Tensor | None
    blocks: tuple[Block, ...]
    norm: Tensor
    head: Linear
