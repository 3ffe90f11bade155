"""What mixes a row with those before it, as data: the parts of the record (record.py) that are no plain attention."""

from dataclasses import dataclass
from typing import Literal

# What mixes a row with those before it: their keys and values, or a state of fixed size that goes from row to row; both
# side by side; or nothing, in a block that is only an MLP or a mixture.
Mixer = Literal["attention", "convolution", "delta", "mamba", "attention and mamba", "nothing"]


@dataclass(frozen=True)
class Latent:
    """Latent attention (DeepSeek-V2, 2405.04434): of one vector a token every head makes its keys and values.

    rank, rotated  dimensions of that vector, and of the key that all heads share and that rotates.
    plain, value   dimensions of a head's query that do not rotate, and of its value.
    query_rank     of the vector that queries are made of; None: they are made of the input.
    norm_eps       of the norms of these vectors.
    """

    rank: int
    rotated: int
    plain: int
    value: int
    query_rank: int | None
    norm_eps: float = 1e-6
    compressed: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm"
    expand: str = "self_attn.kv_b_proj"
    query: str = "self_attn.q_proj"
    query_compressed: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_expand: str = "self_attn.q_b_proj"


@dataclass(frozen=True)
class Convolution:
    """A short convolution between two gates (LFM2): one layer makes gate, second gate and input; of each channel a row
    sees its last `taps` inputs, each times its first gate. The state is all of these but the row's own."""

    taps: int
    into: str = "conv.in_proj"
    filter: str = "conv.conv"
    out: str = "conv.out_proj"


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta rule (2412.06464): each value head keeps a matrix that gives a value for a key.

    Queries, keys and values go through a convolution first. The state is its last inputs, and then the matrices.
    key, value  dimensions of a head.
    into        layers that make, together, queries, keys, values and gates, and for each value head what says how much
                of its matrix is corrected and how much stays.
    grouped     there are two, and their rows stand key head by key head.
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    taps: int
    into: tuple[str, ...] = ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")
    grouped: bool = True
    filter: str = "linear_attn.conv1d"
    step: str = "linear_attn.dt_bias"
    rate: str = "linear_attn.A_log"
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"

    @property
    def channels(self) -> int:
        """Queries, keys and values of a row."""
        return 2 * self.key_heads * self.key + self.values

    @property
    def values(self) -> int:
        """Dimensions of all values of a row."""
        return self.value_heads * self.value

    @property
    def floats(self) -> int:
        """Of the state."""
        return (self.taps - 1) * self.channels + self.values * self.key


@dataclass(frozen=True)
class Mamba:
    """A state space (Mamba-2, 2405.21060): each head keeps a matrix, of which a row leaves a part, and to which it adds
    its input times a vector B; what it reads from it by a vector C is the output.

    One layer makes gates, inputs, Bs, Cs and steps; inputs, Bs and Cs go through a convolution and SiLU. The state is
    the convolution's last inputs, and then the matrices.
    heads, dim     of the inputs; dimensions of a head.
    groups, state  heads of a group have B and C in common; their dimensions.
    limits         between which a row's step lies.
    norm           of the outputs times SiLU of the gates, group by group: "gated"; before they are multiplied: "plain";
                   or none.
    read, added    what it reads and what it adds are multiplied by these.
    multipliers    of gates, inputs, Bs, Cs and steps.
    """

    heads: int
    dim: int
    groups: int
    state: int
    taps: int
    limits: tuple[float, float] = (0.0, float("inf"))
    norm: Literal["gated", "plain", "none"] = "gated"
    read: float = 1.0
    added: float = 1.0
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    # Where the block keeps its parts, which have the same names everywhere.
    name: str = "mamba"

    @property
    def values(self) -> int:
        """Dimensions of all heads."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """Inputs, Bs and Cs of a row."""
        return self.values + 2 * self.groups * self.state

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Of gates, inputs, Bs, Cs and steps."""
        vectors = self.groups * self.state
        return self.values, self.values, vectors, vectors, self.heads

    @property
    def floats(self) -> int:
        """Of the state."""
        return (self.taps - 1) * self.channels + self.values * self.state
