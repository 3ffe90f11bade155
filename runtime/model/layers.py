"""The parts of a decoder: its weights as layers, norms and tables, block by block."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from runtime.checkpoints.record import Experts
from runtime.errors import UserError
from runtime.kernels.dispatch import Kernel
from runtime.kernels.joined import Joined, Linear
from runtime.kernels.library_choice import IMPLEMENTATIONS
from runtime.model.state_layers import DeltaRule, ShortConvolution, StateSpace


@dataclass(frozen=True)
class Norm:
    """A norm's weight, to which the offset that it is stored with has been added, and its bias."""

    weight: Tensor
    bias: Tensor | None = None


class HeadStack(Protocol):
    """One layer of every head in one, on kernels that have a use for it."""

    def __call__(self, x: Tensor) -> Tensor:
        """Each head's layer of its part of x (T, heads, K) float32: (T, heads, N)."""


@dataclass(frozen=True)
class LatentHeads:
    """What latent attention has besides: qkv makes the vector of queries (or queries) and that of a token, whose first
    dimensions are the key that rotates; so are queries' of each head.

    query_norm, query  from the vector of queries to queries; None where qkv makes those.
    norm               of a token's vector.
    keys, values       for each head from the rest of its query to the vector's dimensions, and from there to its value:
                       the halves of the layer that expands the vector, one of them turned round.
    keys_stack, values_stack  the memory of the same layers, where the kernels have a use for it.
    """

    query_norm: Norm | None
    query: Linear | None
    norm: Norm
    keys: tuple[Linear, ...]
    values: tuple[Linear, ...]
    keys_stack: HeadStack | None = None
    values_stack: HeadStack | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All of its layers."""
        return (*(() if self.query is None else (self.query,)), *self.keys, *self.values)


@dataclass(frozen=True)
class Attention:
    """qkv is one layer (fused on disk or joined at load).

    q_norm, k_norm  weights of norms over heads, (d,), (heads, d) or (heads · d,), as query_key_span says.
    sinks           (heads,) float32.
    rotary          the number of its rotary table (RotaryTables.of).
    grows           whether its queries are multiplied by what grows with their position.
    gate            the sigmoids of what it makes multiply what attention mixes: one for each dimension, or each head.
    v_norm          (d,), the weight of a norm of values.
    shares          qkv makes queries alone: keys and values are those that an earlier layer has left in the cache.
    keys_as_values  qkv makes queries and keys, and the values are the keys before norm and rotation.
    """

    qkv: Joined
    out: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None
    sinks: Tensor | None = None
    rotary: int | None = 0
    grows: bool = True
    latent: LatentHeads | None = None
    gate: Linear | None = None
    v_norm: Tensor | None = None
    shares: bool = False
    keys_as_values: bool = False


@dataclass(frozen=True)
class Mlp:
    """down(act(gate(x)) · up(x)), or down(act(up(x))) where gate_up is one layer of one size.

    parameters  float32, of an activation that has some (kernels/activations.py).
    """

    gate_up: Joined
    down: Linear
    parameters: Tensor | None = None


class Stacked(Protocol):
    """All experts of a mixture in one, on kernels that know no others than the device sends rows to."""

    def upper(self) -> "Stacked":
        """The same on the upper planes of int8 weights (`upper_linear`)."""


@dataclass(frozen=True)
class MlpBeside:
    """What a mixture has besides that stands beside an MLP: both read the residual stream.

    norms: of what the MLP makes, before the router, before the experts, and of what these make.
    expert_scale  (experts,) float32, what shares are multiplied by.
    """

    mlp: Mlp
    mlp_output_norm: Norm
    router_norm: Norm
    input_norm: Norm
    output_norm: Norm
    expert_scale: Tensor

    @property
    def norms(self) -> tuple[Norm, ...]:
        """All of them."""
        return self.mlp_output_norm, self.router_norm, self.input_norm, self.output_norm


@dataclass(frozen=True)
class Mixture:
    """Top-k experts by a router. `stacked`: the memory of the same experts, where the kernels have a use for it.

    how                  what the record says; correction (experts,) float32 as kernels/routing.py takes it.
    shared, shared_gate  what every row goes through besides, times the sigmoid of its gate.
    """

    router: Linear
    experts: tuple[Mlp, ...]
    how: Experts
    stacked: Stacked | None = None
    correction: Tensor | None = None
    shared: Mlp | None = None
    shared_gate: Linear | None = None
    beside: MlpBeside | None = None

    @property
    def mlps(self) -> tuple[Mlp, ...]:
        """The experts, and what every row goes through."""
        whole = (self.shared, None if self.beside is None else self.beside.mlp)
        return (*self.experts, *(mlp for mlp in whole if mlp is not None))


@dataclass(frozen=True)
class LayerGate:
    """What a block does with its own input: out(act(gate(x)) · input), through a norm, is added to the stream x."""

    gate: Linear
    out: Linear
    norm: Norm


@dataclass(frozen=True)
class LayerInputs:
    """Where the blocks' own inputs come from: a row of a table (vocabulary, layers · size) of any float type, and what
    a layer makes of the embedding, normed block by block."""

    table: Tensor
    projection: Linear
    norm: Norm


@dataclass(frozen=True)
class Block:
    """One decoder layer. What is None is not there.

    mamba  beside attention, or alone: both read the same.
    """

    input_norm: Norm | None
    attention: Attention | ShortConvolution | DeltaRule | None
    mlp_norm: Norm | None
    mlp: Mlp | Mixture | None
    attention_norm: Norm | None = None
    output_norm: Norm | None = None
    mamba: StateSpace | None = None
    own: LayerGate | None = None
    scale: float = 1.0  # what the stream behind the block is multiplied by

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those that there are."""
        all_of = [self.input_norm, self.attention_norm, self.mlp_norm, self.output_norm]
        if self.own is not None:
            all_of.append(self.own.norm)
        if isinstance(self.mlp, Mixture) and self.mlp.beside is not None:
            all_of += self.mlp.beside.norms
        return tuple(norm for norm in all_of if norm is not None)

    @property
    def mlps(self) -> tuple[Mlp, ...]:
        """The MLP, or all of a mixture's."""
        if self.mlp is None:
            return ()
        return self.mlp.mlps if isinstance(self.mlp, Mixture) else (self.mlp,)


@dataclass(frozen=True, eq=False)
class Parts:
    """All weights of a decoder. `embedding` None: its rows are the head's. positions (P, hidden): learned ones."""

    embedding: Tensor | None
    blocks: tuple[Block, ...]
    norm: Norm
    head: Linear
    positions: Tensor | None = None
    layer_inputs: LayerInputs | None = None


def linears(parts: Parts) -> Iterator[Linear]:
    """Every linear layer, in a forward's order; of a mixture all experts."""
    if parts.layer_inputs is not None:
        yield parts.layer_inputs.projection
    for block in parts.blocks:
        if block.mamba is not None:
            yield from (block.mamba.into, block.mamba.out)
        if block.attention is not None:
            yield from _mixing(block.attention)
        if isinstance(block.mlp, Mixture):
            yield block.mlp.router
            if block.mlp.shared_gate is not None:
                yield block.mlp.shared_gate
        for mlp in block.mlps:
            yield from mlp_linears(mlp)
        if block.own is not None:
            yield from (block.own.gate, block.own.out)
    yield parts.head


def _mixing(mixer: Attention | ShortConvolution | DeltaRule) -> Iterator[Linear]:
    yield from mixer.qkv.parts
    if isinstance(mixer, Attention) and mixer.latent is not None:
        yield from mixer.latent.linears
    if isinstance(mixer, Attention) and mixer.gate is not None:
        yield mixer.gate
    yield mixer.out


def mlp_linears(mlp: Mlp) -> tuple[Linear, ...]:
    """The linear layers of one MLP or expert."""
    return (*mlp.gate_up.parts, mlp.down)


def weight_bytes(*decoders: Parts) -> int:
    """Bytes of memory that the weights of these decoders take together: what they share counts once."""
    held = {tensor.data_ptr(): tensor.nbytes for parts in decoders for tensor in _tensors(parts)}
    return sum(held.values())


def _tensors(parts: Parts) -> Iterator[Tensor]:
    for layer in linears(parts):
        yield from layer.tensors
    vectors, norms = [parts.embedding, parts.positions], [parts.norm]
    if parts.layer_inputs is not None:
        vectors.append(parts.layer_inputs.table)
        norms.append(parts.layer_inputs.norm)
    for norm in (*norms, *(norm for block in parts.blocks for norm in block.norms)):
        vectors += [norm.weight, norm.bias]
    for block in parts.blocks:
        vectors += _vectors(block.attention) + _vectors(block.mamba)
        if isinstance(block.mlp, Mixture):
            vectors += [block.mlp.correction, None if block.mlp.beside is None else block.mlp.beside.expert_scale]
        elif block.mlp is not None:
            vectors.append(block.mlp.parameters)
    yield from (vector for vector in vectors if vector is not None)


def _vectors(mixer: Attention | ShortConvolution | DeltaRule | StateSpace | None) -> list[Tensor | None]:
    if mixer is None:
        return []
    if isinstance(mixer, StateSpace):
        return [mixer.taps, mixer.bias, mixer.step, mixer.rate, mixer.skip, mixer.norm, mixer.multipliers]
    if isinstance(mixer, DeltaRule):
        return [mixer.taps, mixer.step, mixer.rate, mixer.query, mixer.key, mixer.norm]
    if isinstance(mixer, ShortConvolution):
        return [mixer.taps, mixer.bias]
    found = [mixer.q_norm, mixer.k_norm, mixer.v_norm, mixer.sinks]
    if (latent := mixer.latent) is not None:
        found += [latent.norm.weight, None if latent.query_norm is None else latent.query_norm.weight]
    return found


def described(decoder: Any) -> str:
    """The decoder's kernels by name, and how many of its layers run on which library's products."""
    parts = getattr(decoder, "parts", None)
    if not isinstance(parts, Parts):
        return str(decoder.kernels)
    counts, total = _counts(parts), sum(1 for _ in linears(parts))
    return "; ".join([decoder.kernels, *(f"{name} in {count} of {total} layers" for name, count in counts.items())])


def require_used(kernel: Kernel, parts: Parts) -> None:
    """Raises UserError where a library was asked for by name and takes none of the layers."""
    if kernel.name in IMPLEMENTATIONS and kernel.table and not _counts(parts)[kernel.name]:
        schemes = ", ".join(IMPLEMENTATIONS[kernel.name].schemes)
        raise UserError(
            f"kernels={kernel.name!r} take none of this model's layers: they are for {schemes}, in sizes that they"
            " divide; use kernels='auto'"
        )


def _counts(parts: Parts) -> Counter[str]:
    return Counter(name for layer in linears(parts) for name in getattr(layer, "libraries", ()))
