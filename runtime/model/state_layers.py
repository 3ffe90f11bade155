"""The layers that carry a state from row to row, with their weights."""

from dataclasses import dataclass

from torch import Tensor

from runtime.kernels.joined import Joined, Linear


@dataclass(frozen=True)
class ShortConvolution:
    """A convolution in attention's place: qkv makes gate, second gate and input; out takes what comes of them.

    taps  (taps, channels) float32, the oldest input's first.
    bias  (channels,) float32.
    """

    qkv: Joined
    out: Linear
    taps: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class DeltaRule:
    """A gated delta rule in attention's place (mixers.DeltaNet). All vectors and tables are float32.

    qkv   makes queries, keys and values, gates, and for each value head corrections and what becomes its decay.
    taps  (taps, channels), the oldest input's first.
    step  (value heads,), added to what becomes the decay; rate (value heads,), below 0, what multiplies it then.
    query, key  (key,), weights that turn a norm by the root mean square into one by length; queries are scaled, too.
    norm  (value,), of the norm of a head's output.
    """

    qkv: Joined
    out: Linear
    taps: Tensor
    step: Tensor
    rate: Tensor
    query: Tensor
    key: Tensor
    norm: Tensor


@dataclass(frozen=True)
class StateSpace:
    """A state space in attention's place or beside it (mixers.Mamba). All vectors and tables are float32.

    into  makes gates, inputs, Bs, Cs and steps; multipliers (its outputs,): of what it makes; None: 1.
    taps  (taps, channels), the oldest input's first; bias (channels,).
    step  (heads,), added to the steps; rate (heads,), below 0; skip (heads,): by how much an input is its own output.
    norm  (groups, dimensions of a group); None: there is no norm.
    """

    into: Linear
    out: Linear
    taps: Tensor
    bias: Tensor | None
    step: Tensor
    rate: Tensor
    skip: Tensor
    norm: Tensor | None
    multipliers: Tensor | None
