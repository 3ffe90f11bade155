"""What a decoder is, as data: one frozen record per model, which every decoder reads, and nothing else of a family."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from runtime.checkpoints.mixers import Convolution, DeltaNet, Latent, Mamba, Mixer

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu", "clamped_swiglu"]


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
    # A layer whose sigmoids multiply what attention mixes, where it is one of its own.
    attention_gate: str | None = None
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
    # An MLP that every token goes through besides, of so many channels (0: none); its layers in the block, as
    # Names.gate_up and Names.down have them; and what gates it, beside the router.
    shared: int = 0
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
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


class HeadShape(NamedTuple):
    """How many key heads a layer has, and the dimensions of each of its heads."""

    kv_heads: int
    head_dim: int


class KeyGroup(NamedTuple):
    """Layers whose keys and values have one shape: they lie in one memory."""

    shape: HeadShape
    layers: tuple[int, ...]


class StateShape(NamedTuple):
    """What a layer's state is made of: floats of a convolution's last inputs, and then rows of matrices."""

    inputs: int = 0
    rows: int = 0
    columns: int = 0

    @property
    def floats(self) -> int:
        """In all."""
        return self.inputs + self.rows * self.columns

    @property
    def bytes(self) -> int:
        """In int8: inputs stay float32, and each row's codes follow its scale; a whole number of floats."""
        return 4 * self.inputs + -(-self.rows * (4 + self.columns) // 4) * 4


class CacheShape(NamedTuple):
    """(layers, kv_heads, head_dim) of each group of layers, and floats of the states of all layers that carry one."""

    groups: tuple[tuple[int, int, int], ...]
    state: int


@dataclass(frozen=True)
class Architecture:
    """What the decoder needs to know of a checkpoint. The defaults are those of the Llama family.

    A model without attention has no heads: heads, kv_heads and head_dim are 0.
    """

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
    # For each layer the set of rotary parameters (a key of rope_parameters, "": the only one; a number: the same with
    # this base); None: not rotated. (): the only one everywhere.
    rotary: tuple[str | float | None, ...] = ()
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
    mamba: Mamba | None = None
    # Layers that have no MLP.
    without_mlp: tuple[int, ...] = ()
    # Multipliers of what attention reads and what it adds, and of the MLP's gates before their activation and of what
    # it adds.
    attention_scales: tuple[float, float] = (1.0, 1.0)
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    # The layer of queries makes as many numbers besides, head by head, whose sigmoids multiply what attention mixes.
    output_gate: bool = False
    # A layer of its own that does (Names.attention_gate) makes one number for each head, not one for each dimension.
    gate_by_head: bool = False
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
        attends = ("attention", "attention and mamba")
        return tuple(n for n in range(self.layers) if not self.mixers or self.mixers[n] in attends)

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
        # Without attention there is one group all the same, of no layers.
        groups = groups or ((0, self.kv_heads, self.head_dim),)
        return CacheShape(groups, sum(self.state_sizes))

    def shape(self, layer: int) -> HeadShape:
        """Of a layer's keys; queries have as many dimensions."""
        return self.head_shapes[layer] if self.head_shapes else HeadShape(self.kv_heads, self.head_dim)

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        return self.keys_of[layer] if self.keys_of else layer

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """Of each layer."""
        c, d, m, none = self.convolution, self.delta, self.mamba, StateShape()
        convolution = none if c is None else StateShape((c.taps - 1) * self.hidden)
        delta = none if d is None else StateShape((d.taps - 1) * d.channels, d.value_heads * d.key, d.value)
        mamba = none if m is None else StateShape((m.taps - 1) * m.channels, m.heads * m.state, m.dim)
        shapes: dict[Mixer, StateShape] = {"convolution": convolution, "delta": delta}
        shapes |= {"mamba": mamba, "attention and mamba": mamba}
        return tuple(shapes.get(mixer, none) for mixer in self.mixers) or (none,) * self.layers

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Floats of each layer's state."""
        return tuple(shape.floats for shape in self.state_shapes)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each layer: the number of its keys among the cache's layers, which stand group by group (0: it has none);
        and the first float of its state among a token's."""
        held = [layer for group in self.key_groups for layer in group.layers]
        sizes, attending = self.state_sizes, self.attending
        return tuple((held.index(self.source(n)) if n in attending else 0, sum(sizes[:n])) for n in range(self.layers))

    @property
    def scaling(self) -> float:
        """What attention's scores are multiplied by."""
        return max(self.head_dim, 1) ** -0.5 if self.attention_scale is None else self.attention_scale

    @property
    def value_dim(self) -> int:
        """Dimensions of a value in the cache."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def rotations(self) -> tuple[str | float | None, ...]:
        """`rotary` for every layer."""
        return self.rotary or ("",) * self.layers
