"""A decoder's parts as the structs that the native decoder reads, for one kind of cache."""

import ctypes
import weakref
from ctypes import POINTER, byref, pointer
from typing import Any

import torch
from torch import Tensor

from runtime.cache.quantizer import CacheFormat
from runtime.checkpoints.record import Architecture
from runtime.errors import UserError
from runtime.kernels.dispatch import Kernel
from runtime.kernels.joined import Joined
from runtime.kernels.native_linear import NativeWeight, WeightPointer, project
from runtime.model.layers import Attention, Block, LatentHeads, LayerInputs, Mixture, MlpBeside, Norm, Parts
from runtime.model.rotary import RotaryTables
from runtime.model.state_layers import DeltaRule, ShortConvolution, StateSpace
from runtime.native.binding import ACTIVATIONS, CACHES, PATHS, SCORINGS, pool, require
from runtime.native.structs import (
    ConvolutionStruct,
    DeltaStruct,
    HeadsStruct,
    LatentStruct,
    LayerGateStruct,
    LayerInputsStruct,
    LayerStruct,
    MambaStruct,
    MixtureStruct,
    MlpBesideStruct,
    ModelStruct,
    NormStruct,
    ProjectionStruct,
    RoutingStruct,
    WeightsStruct,
)

# The types of tables that are read row by row.
TABLES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class NativeModel:
    """The native decoder for one kind of cache, and the structs it was made from."""

    def __init__(
        self, a: Architecture, parts: Parts, kernel: Kernel, rotary: RotaryTables, formats: tuple[CacheFormat, ...]
    ):
        """`formats`: of caches, one for each group of layers. Raises UserError for sizes that do not fit each other."""
        self._own = tuple((form.key_factor, form.basis) for form in formats)
        self._parts, self._pool = parts, pool(kernel.threads)
        layers = (LayerStruct * len(parts.blocks))()
        self._architecture, self._kept = a, list[Any]([layers])
        # Without attention there is a format of no layers.
        widths = [rotary.width(group.layers[0]) for group in a.key_groups] or [0]
        heads = (HeadsStruct * len(formats))(
            *[self._heads(form, width) for form, width in zip(formats, widths, strict=True)]
        )
        self._kept.append(heads)
        for number, (layer, block) in enumerate(zip(layers, parts.blocks, strict=True)):
            self._fill(layer, block, number)
        model = ModelStruct(
            heads=heads,
            groups=len(heads),
            layers=len(layers),
            hidden=a.hidden,
            intermediate=max([0, *(_weight(mlp.down).shape[1] for block in parts.blocks for mlp in block.mlps)]),
            vocabulary=a.vocab,
            activation=ACTIVATIONS[a.activation],
            gated=a.gated,
            layer_norm=a.norm == "layer",
            parallel=a.parallel,
            norm_of_heads=a.query_key_span == "heads",
            norm_rotated=a.query_key_norm_rotated,
            tables=rotary.count,
            chunked=a.chunked,
            norm_eps=a.norm_eps,
            embedding_scale=a.embedding_scale,
            attention_scaling=a.scaling,
            logits_scale=a.logits_scale,
            softcap=a.softcap,
            final_softcap=a.final_softcap,
            attention_read=a.attention_scales[0],
            attention_added=a.residual_scale * a.attention_scales[1],
            mlp_gates=a.mlp_scales[0],
            mlp_added=a.residual_scale * a.mlp_scales[1],
            own_added=a.residual_scale,
            layer=layers,
            norm=_norm(parts.norm),
            head=pointer(_weight(parts.head).struct),
            embedding=None if parts.embedding is None else parts.embedding.data_ptr(),
            embedding_type=0 if parts.embedding is None else TABLES[parts.embedding.dtype],
            positions=address(parts.positions),
            inputs=None if parts.layer_inputs is None else pointer(self._inputs(parts.layer_inputs)),
        )
        self.handle = require().specpress_decoder_new(byref(model), PATHS[kernel.name], self._pool.handle)
        if self.handle is None:
            raise UserError("config.json: heads, sizes and experts do not belong together, or are beyond the kernels'")
        weakref.finalize(self, require().specpress_decoder_free, self.handle)

    def fits(self, formats: tuple[CacheFormat, ...]) -> bool:
        """Whether it is for caches of these formats, one of whose kind it was made for."""
        return all(
            form.key_factor is factor and form.basis is basis
            for form, (factor, basis) in zip(formats, self._own, strict=True)
        )

    def _heads(self, form: CacheFormat, rotated: int) -> HeadsStruct:
        factors = None if form.key_factor is None else form.key_factor.float().contiguous()
        parts = (None, None) if form.basis is None else (form.basis.keys, form.basis.values)
        bases = [None if part is None else part.float().contiguous() for part in parts]
        self._kept += [factors, *bases]
        kind, heads = CACHES[form.kind], self._architecture.heads
        sizes = heads, form.kv_heads, form.head_dim, rotated, kind, address(factors), form.value_dim
        return HeadsStruct(*sizes, *[address(basis) for basis in bases])

    def _fill(self, layer: LayerStruct, block: Block, number: int) -> None:
        layer.input_norm, layer.attention_norm = _norm(block.input_norm), _norm(block.attention_norm)
        layer.mlp_norm, layer.output_norm = _norm(block.mlp_norm), _norm(block.output_norm)
        layer.rotary = -1
        if block.mamba is not None:
            layer.mamba = pointer(self._mamba(block.mamba))
        if block.attention is not None:
            layer.qkv = self._projection(block.attention.qkv)
            layer.out = pointer(_weight(block.attention.out).struct)
        if isinstance(block.attention, ShortConvolution):
            layer.convolution = pointer(self._convolution(block.attention))
        elif isinstance(block.attention, DeltaRule):
            layer.delta = pointer(self._delta(block.attention))
        elif block.attention is not None:
            self._attention(layer, block.attention, number)
        if isinstance(block.mlp, Mixture):
            layer.mixture = pointer(self._mixture(block.mlp))
            layer.parameters = address(block.mlp.experts[0].parameters)
        elif block.mlp is not None:
            layer.gate_up = self._projection(block.mlp.gate_up)
            layer.down = pointer(_weight(block.mlp.down).struct)
            layer.parameters = address(block.mlp.parameters)
        layer.scale = block.scale
        if (own := block.own) is not None:
            self._kept.append(
                LayerGateStruct(*(pointer(_weight(w).struct) for w in (own.gate, own.out)), _norm(own.norm))
            )
            layer.own = pointer(self._kept[-1])

    def _attention(self, layer: LayerStruct, attention: Attention, number: int) -> None:
        a = self._architecture
        shape, source = a.shape(number), a.source(number)
        groups = [group.layers for group in a.key_groups]
        layer.group = next(n for n, layers in enumerate(groups) if source in layers)
        layer.keys = groups[layer.group].index(source)
        layer.shares, layer.keys_as_values = attention.shares, attention.keys_as_values
        layer.query_norm = self._of_heads(attention.q_norm, a.heads * shape.head_dim)
        layer.key_norm = self._of_heads(attention.k_norm, shape.kv_heads * shape.head_dim)
        layer.value_norm = self._of_heads(attention.v_norm, shape.kv_heads * shape.head_dim)
        layer.sinks = address(attention.sinks)
        if attention.gate is not None:
            layer.gate = pointer(_weight(attention.gate).struct)
        if attention.latent is not None:
            layer.latent = pointer(self._latent(attention.latent))
        layer.window = attention.window or 0
        layer.rotary, layer.grows = -1 if attention.rotary is None else attention.rotary, attention.grows

    def _convolution(self, how: ShortConvolution) -> ConvolutionStruct:
        self._kept.append(ConvolutionStruct(address(how.taps), address(how.bias), len(how.taps)))
        found: ConvolutionStruct = self._kept[-1]
        return found

    def _delta(self, how: DeltaRule) -> DeltaStruct:
        d = self._architecture.delta
        assert d is not None
        vectors = [address(part) for part in (how.taps, how.step, how.rate, how.query, how.key, how.norm)]
        sizes = d.taps, d.key_heads, d.value_heads, d.key, d.value
        self._kept.append(DeltaStruct(*vectors, *sizes, 1e-6 / d.key))
        found: DeltaStruct = self._kept[-1]
        return found

    def _mamba(self, how: StateSpace) -> MambaStruct:
        a, m = self._architecture, self._architecture.mamba
        assert m is not None
        vectors = (how.multipliers, how.taps, how.bias, how.step, how.rate, how.skip, how.norm)
        struct = MambaStruct(
            *(pointer(_weight(layer).struct) for layer in (how.into, how.out)),
            *(address(part) for part in vectors),
            *(m.taps, m.heads, m.dim, m.groups, m.state, m.norm == "gated"),
            *(*m.limits, m.read, a.residual_scale * m.added),
        )
        self._kept.append(struct)
        return struct

    def _inputs(self, own: LayerInputs) -> LayerInputsStruct:
        a, table = self._architecture, own.table
        if table.dtype not in TABLES:
            table = table.float()
        self._kept += [
            table,
            LayerInputsStruct(
                table.data_ptr(),
                TABLES[table.dtype],
                a.layer_input,
                pointer(_weight(own.projection).struct),
                _norm(own.norm),
                *(a.hidden**-0.5, a.layer_input**0.5, 2**-0.5),
            ),
        ]
        found: LayerInputsStruct = self._kept[-1]
        return found

    def _of_heads(self, weight: Tensor | None, size: int) -> int | None:
        """The address of a weight for every head, one after the other, `size` in all."""
        if weight is None:
            return None
        whole = weight if weight.numel() == size else weight.repeat(size // weight.numel())
        self._kept.append(whole.flatten().contiguous())
        return int(self._kept[-1].data_ptr())

    def _projection(self, joined: Joined) -> ProjectionStruct:
        projection = project([_weight(part) for part in joined.parts])
        self._kept.append(projection)
        return projection

    def _latent(self, heads: LatentHeads) -> LatentStruct:
        how = self._architecture.latent
        assert how is not None
        arrays = [
            (WeightPointer * len(layers))(*[pointer(_weight(layer).struct) for layer in layers])
            for layers in (heads.keys, heads.values)
        ]
        struct = LatentStruct(
            None if heads.query_norm is None else address(heads.query_norm.weight),
            None if heads.query is None else pointer(_weight(heads.query).struct),
            address(heads.norm.weight),
            *(ctypes.cast(array, POINTER(POINTER(WeightsStruct))) for array in arrays),
            *(how.rotated, how.plain, how.norm_eps),
        )
        self._kept += [*arrays, struct]
        return struct

    def _mixture(self, mixture: Mixture) -> MixtureStruct:
        count = len(mixture.experts)
        gate_up = (ProjectionStruct * count)(*[self._projection(e.gate_up) for e in mixture.experts])
        down = (WeightPointer * count)(*[pointer(_weight(e.down).struct) for e in mixture.experts])
        how = mixture.how
        routing = RoutingStruct(
            *(count, how.per_token, how.renormalize, SCORINGS[how.scoring], *how.groups, how.scale, how.tolerance),
            address(mixture.correction),
            how.scaled_inputs,
            None if mixture.beside is None else address(mixture.beside.expert_scale),
        )
        shared, gate = mixture.shared, mixture.shared_gate
        struct = MixtureStruct(
            routing,
            pointer(_weight(mixture.router).struct),
            ctypes.cast(gate_up, POINTER(ProjectionStruct)),
            ctypes.cast(down, POINTER(POINTER(WeightsStruct))),
            ProjectionStruct() if shared is None else self._projection(shared.gate_up),
            None if shared is None else pointer(_weight(shared.down).struct),
            None if gate is None else pointer(_weight(gate).struct),
            None if mixture.beside is None else pointer(self._beside(mixture.beside)),
        )
        self._kept += [gate_up, down, struct]
        return struct

    def _beside(self, beside: MlpBeside) -> MlpBesideStruct:
        mlp, norms = beside.mlp, [_norm(norm) for norm in beside.norms]
        self._kept.append(MlpBesideStruct(self._projection(mlp.gate_up), pointer(_weight(mlp.down).struct), *norms))
        found: MlpBesideStruct = self._kept[-1]
        return found


def address(tensor: Tensor | None) -> int | None:
    """Of the first element; None for none."""
    return None if tensor is None else int(tensor.data_ptr())


def _norm(norm: Norm | None) -> NormStruct:
    return NormStruct() if norm is None else NormStruct(address(norm.weight), address(norm.bias))


def _weight(layer: Any) -> NativeWeight:
    """Native decoders are made of native layers."""
    weight: NativeWeight = layer.weight
    return weight
