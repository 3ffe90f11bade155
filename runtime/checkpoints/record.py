"""What a decoder is, as data: one frozen record per model, which every decoder reads, and nothing else of a family."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu", "clamped_swiglu"]
# What mixes a row with those before it: their keys and values, or a state of fixed size that goes from row to row.
Mixer = Literal["attention", "convolution", "delta"]


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls the parts of a model; a norm that is None is not there.

    Names of layers are relative to the block. One name for several parts is a tensor that holds them all.
    """

    embedding: str = "model.embed_tokens"
    block: str = "model.layers.{}"
    norm: str = "model.norm"
    head: str = "lm_head"
    # Learned vectors, one for each position.
    positions: str | None = None
    input_norm: str | None = "input_layernorm"
    attention_norm: str | None = None  # of what attention adds
    mlp_norm: str | None = "post_attention_layernorm"
    output_norm: str | None = None  # of what the MLP adds
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    # Gate and factor, or the one layer before an activation without a gate.
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    # Of inputs that each layer has for itself (Architecture.layer_input): of the model a table, a layer and the norm of
    # what that makes; of a block the gate, the layer behind it and the norm of what is added.
    layer_table: str = "model.embed_tokens_per_layer"
    layer_projection: str = "model.per_layer_model_projection"
    layer_norm: str = "model.per_layer_projection_norm"
    layer_gate: str = "per_layer_input_gate"
    layer_out: str = "per_layer_projection"
    layer_out_norm: str = "post_per_layer_input_norm"
    # One number that multiplies what a block leaves.
    block_scale: str | None = None


@dataclass(frozen=True)
class Beside:
    """A mixture beside an MLP (Gemma 4): both read the residual stream, each through a norm of its own.

    router_scale  multiplies the router's rows, normed without a weight, beside hidden ** -0.5; expert_scale: shares.
    mlp_output_norm, input_norm, output_norm  after the MLP; before and after the experts.
    """

    router_scale: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    mlp_output_norm: str = "post_feedforward_layernorm_1"
    input_norm: str = "pre_feedforward_layernorm_2"
    output_norm: str = "post_feedforward_layernorm_2"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP, or beside it."""

    count: int
    per_token: int
    hidden: int
    renormalize: bool
    # Where the block keeps it ("": in itself): "block_sparse_moe" in old Mixtral files, "mlp" since transformers 5.
    names: tuple[str, ...] = ("mlp", "block_sparse_moe")
    routers: tuple[str, ...] = ("gate",)
    # What makes shares of the router's scores (kernels/routing.py); what is added to them to choose by (a tensor), and
    # only to choose; the shares are multiplied by `scale` in the end.
    scoring: Literal["softmax", "sigmoid", "sparse mixer"] = "softmax"
    correction: str | None = None
    scale: float = 1.0
    # Of the sparse mixer: by which part of the larger of the two a score may lie below the best and share with it.
    tolerance: float = 0.0
    # Experts stand in so many groups, of which so many are chosen from: those whose best so many add up to most.
    groups: tuple[int, int, int] = (1, 1, 1)
    # An MLP that every token goes through besides, of so many channels (0: none), where it is, and what gates it.
    shared: int = 0
    shared_name: str = "shared_expert"
    shared_gate: str | None = None
    # A share multiplies what its expert reads, not what it makes.
    scaled_inputs: bool = False
    # Of experts in one tensor: its names, one pair or another; whether it is (inputs, outputs); whether gate and factor
    # take turns.
    fused: tuple[tuple[str, str], ...] = (("experts.gate_up_proj", "experts.down_proj"),)
    transposed: bool = False
    interleaved: bool = False
    # gpt-oss: the limit of gates and factors, and what the gate is multiplied by in its sigmoid.
    clamp: tuple[float, float] | None = None
    beside: Beside | None = None


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


class HeadShape(NamedTuple):
    """How many key heads a layer has, and the dimensions of each of its heads."""

    kv_heads: int
    head_dim: int


class KeyGroup(NamedTuple):
    """Layers whose keys and values have one shape: they lie in one memory."""

    shape: HeadShape
    layers: tuple[int, ...]


class CacheShape(NamedTuple):
    """(layers, kv_heads, head_dim) of each group of layers, and floats of the states of all layers that carry one."""

    groups: tuple[tuple[int, int, int], ...]
    state: int


@dataclass(frozen=True)
class Architecture:
    """What the decoder needs to know of a checkpoint. The defaults are those of the Llama family."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    norm_eps: float
    tied: bool
    activation: Activation
    # Norm weights are stored minus this (Gemma: 1), and embeddings are multiplied by that (Gemma: sqrt(hidden)).
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    query_key_norm: bool = False
    fused: bool = False
    # Window in tokens per layer; None: the layer sees everything. It slides; or texts are cut into chunks of so many
    # tokens, and a row sees those of its own.
    windows: tuple[int | None, ...] = ()
    chunked: bool = False
    experts: Experts | None = None
    # Layers whose MLP is dense although the model has experts.
    dense_layers: tuple[int, ...] = ()
    names: Names = Names()
    # By the root mean square, or by mean and variance.
    norm: Literal["rms", "layer"] = "rms"
    # Attention and MLP both read what comes into the block.
    parallel: bool = False
    # What scores are multiplied by; None: 1 / sqrt(head_dim). A softcap c makes c · tanh(x / c) of x; 0: none.
    attention_scale: float | None = None
    softcap: float = 0.0
    final_softcap: float = 0.0
    # A score for each head that takes part in the softmax and has no value.
    sinks: bool = False
    # Queries and keys are normed head by head, each head by a weight of its own, or all heads as one vector.
    query_key_span: Literal["head", "each head", "heads"] = "head"
    query_key_norm_rotated: bool = False
    # Those norms have weights; and are in all layers, or in those that rotate.
    query_key_weights: bool = True
    query_key_norm_layers: Literal["all", "rotated"] = "all"
    # For each layer the set of rotary parameters (a key of rope_parameters, "": the only one); None: not rotated. ():
    # the only one everywhere.
    rotary: tuple[str | None, ...] = ()
    # Dimensions 2i and 2i + 1 rotate together, not i and i + half.
    rotary_neighbours: bool = False
    # Queries are multiplied by 1 + a · ln(1 + floor((position + c) / b)): (a, b, c); in all layers, or in those that
    # do not rotate.
    query_growth: tuple[float, int, int] | None = None
    query_growth_layers: Literal["all", "not rotated"] = "all"
    # Learned positions begin with this row of their table.
    first_position: int = 0
    # Rows of fused queries, keys and values: all of each, or those of one key head after the other.
    grouped_rows: bool = False
    # Matrices are stored (inputs, outputs).
    transposed: bool = False
    gated: bool = True
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    # Then head_dim is of what the cache holds, the shared key and the vector, and there is one key head.
    latent: Latent | None = None
    # What each layer mixes rows by; (): all by attention.
    mixers: tuple[Mixer, ...] = ()
    convolution: Convolution | None = None
    delta: DeltaNet | None = None
    # The layer of queries makes as many numbers besides, head by head, whose sigmoids multiply what attention mixes.
    output_gate: bool = False
    # Of each layer, where they differ: (): kv_heads and head_dim, `intermediate`.
    head_shapes: tuple[HeadShape, ...] = ()
    intermediates: tuple[int, ...] = ()
    # The layer whose keys and values each layer reads, an earlier one or itself; (): all have their own.
    keys_of: tuple[int, ...] = ()
    # Layers whose values are their keys, as they are before norm and rotation.
    keys_as_values: tuple[int, ...] = ()
    # Values are normed head by head, without a weight.
    value_norm: bool = False
    # Each layer has an input of so many numbers for itself (Gemma 3n's): a row of a table and what a layer makes of the
    # embedding; gated, it adds to what the block leaves. 0: none.
    layer_input: int = 0

    @property
    def attending(self) -> tuple[int, ...]:
        """The layers with attention."""
        return tuple(n for n in range(self.layers) if not self.mixers or self.mixers[n] == "attention")

    @cached_property
    def key_groups(self) -> tuple[KeyGroup, ...]:
        """The layers of which the cache holds keys and values, by their shape, in order of their first layers."""
        groups: dict[HeadShape, list[int]] = {}
        for layer in self.attending:
            if self.source(layer) == layer:
                groups.setdefault(self.shape(layer), []).append(layer)
        return tuple(KeyGroup(shape, tuple(layers)) for shape, layers in groups.items())

    @cached_property
    def cache_shape(self) -> CacheShape:
        """What a cache of the model's keys, values and states is made of."""
        groups = tuple((len(layers), *shape) for shape, layers in self.key_groups)
        return CacheShape(groups, sum(self.state_sizes))

    def shape(self, layer: int) -> HeadShape:
        """Of a layer's keys; queries have as many dimensions."""
        return self.head_shapes[layer] if self.head_shapes else HeadShape(self.kv_heads, self.head_dim)

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        return self.keys_of[layer] if self.keys_of else layer

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Floats of each layer's state."""
        sizes = {
            "attention": 0,
            "convolution": 0 if self.convolution is None else (self.convolution.taps - 1) * self.hidden,
            "delta": 0 if self.delta is None else self.delta.floats,
        }
        return tuple(sizes[mixer] for mixer in self.mixers or ("attention",) * self.layers)

    @property
    def places(self) -> tuple[int, ...]:
        """Of each layer: the number of its keys among the cache's layers, which stand group by group; where it has a
        state, the state's first float among a token's."""
        held = [layer for group in self.key_groups for layer in group.layers]
        sizes, attending = self.state_sizes, self.attending
        return tuple(held.index(self.source(n)) if n in attending else sum(sizes[:n]) for n in range(self.layers))

    @property
    def scaling(self) -> float:
        """What attention's scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def value_dim(self) -> int:
        """Dimensions of a value in the cache."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def rotations(self) -> tuple[str | None, ...]:
        """`rotary` for every layer."""
        return self.rotary or ("",) * self.layers
