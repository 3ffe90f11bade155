"""What the record says in one native call per forward: reference.py's meaning, nothing of Python inside the layers."""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_void_p, pointer
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime.cache.contiguous import KeyValueCache
from runtime.cache.quantizer import CacheFormat
from runtime.cache.slots import Reserved, checked_cache, extend_states, learn_drafts, reserve, reserve_drafts
from runtime.checkpoints.architecture import Architecture
from runtime.contract import UNCALIBRATED, Cache, CacheKind, CacheScheme, Out, Rows, integers
from runtime.errors import UserError
from runtime.kernels.dispatch import Kernel
from runtime.kernels.joined import Joined
from runtime.kernels.native_linear import NativeWeight, WeightPointer, project
from runtime.model.layers import Attention, Block, DeltaRule, LatentHeads, Mixture, Norm, Parts, ShortConvolution
from runtime.model.native_batch import Batches, int64
from runtime.model.reference import BaseDecoder
from runtime.native.binding import (
    ACTIVATIONS,
    CACHES,
    PATHS,
    SCORINGS,
    AnglesStruct,
    ConvolutionStruct,
    DeltaStruct,
    HeadsStruct,
    LatentStruct,
    LayerStruct,
    MixtureStruct,
    ModelStruct,
    NormStruct,
    ProjectionStruct,
    RoutingStruct,
    WeightsStruct,
    pool,
    require,
)

_EMBEDDINGS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Dimensions of a head (attention.cpp) and experts of a layer (rows.cpp) that the kernels have room for.
MOST = 1024


class NativeDecoder(BaseDecoder):
    """A `Decoder` on native kernels: a row's bits are the same at every width, on any number of threads."""

    def __init__(
        self, architecture: Architecture, config: Any, parts: Parts, kernel: Kernel, kv: CacheScheme = UNCALIBRATED
    ):
        """Without `parts.embedding` its rows are the head's (tied, float). Raises UserError for sizes beyond the
        kernels'."""
        experts = 0 if architecture.experts is None else architecture.experts.count
        for key, found in (("head_dim", architecture.head_dim), ("the number of experts", experts)):
            if found > MOST:
                raise UserError(
                    f"config.json: {key} is {found}, and the native kernels hold at most {MOST};"
                    " use kernels='reference'"
                )
        if parts.embedding is not None and parts.embedding.dtype not in _EMBEDDINGS:
            parts = replace(parts, embedding=parts.embedding.float())
        super().__init__(architecture, config, parts, kernel, kv)
        self._native: dict[CacheKind, _Native] = {}
        self._batches = Batches()

    def new_cache(self, kind: CacheKind = "float32", pages: int | None = None) -> KeyValueCache:
        """See BaseDecoder. Raises UserError for float16, which only GPUs take."""
        if kind not in CACHES:
            raise UserError(
                f"the kernels for CPUs hold keys and values in {', '.join(CACHES)}, not in {kind}, which needs a GPU; "
                "choose one of them."
            )
        return super().new_cache(kind, pages)

    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None = None) -> Out:
        """See contract.Decoder. Raises TypeError and ValueError as slots.checked_cache and slots.reserve."""
        held, count = checked_cache(tokens, rows, cache, logits_at, self.architecture), len(rows)
        if count == 0:
            return Out(torch.empty((0, self.vocab_size)), torch.empty((0, self.hidden_size)))
        self._recall_states(rows, held)
        reserved = reserve(rows, held)
        extend_states(reserved, tokens, held, logits_at)
        batch, kept = self._batches.of(reserved, tokens, rows.position, held)
        angles = self._angles(max(r.start + r.count for r in reserved) - 1)
        at = self._batches.constants(count)[2] if logits_at is None else int64(logits_at)
        asked = count if logits_at is None else at.numel()
        # Uninitialised: the kernels write every element.
        logits, hidden = torch.empty((asked, self.vocab_size)), torch.empty((asked, self.hidden_size))
        handle = self._runner(held).handle
        require().specpress_forward(
            handle, byref(batch), byref(angles), at.data_ptr(), asked, hidden.data_ptr(), logits.data_ptr()
        )
        del kept
        return Out(logits, hidden)

    def continue_greedy(self, tokens: Tensor, rows: Rows, cache: Cache, steps: Sequence[int], limit: int) -> Tensor:
        """See contract.GreedyChains. The tokens are those that `forward` would lead to, step by step: the same bits."""
        held = checked_cache(tokens, rows, cache, None, self.architecture)
        self._recall_states(rows, held)
        reserved = reserve_drafts(rows, held, steps, limit, self.vocab_size)
        if not reserved:
            return torch.empty((0, 0), dtype=torch.int64)
        extend_states(reserved, tokens, held, further=[count - 1 for count in steps])
        batch, kept = self._batches.of(reserved, tokens, rows.position, held)
        angles = self._angles(max(r.start + r.count + s for r, s in zip(reserved, steps, strict=True)) - 2)
        wanted, longest = integers(steps), max(steps)
        drafted = torch.full((len(steps), longest), -1, dtype=torch.int64)
        handle = self._runner(held).handle
        finite = require().specpress_draft(
            handle, byref(batch), byref(angles), len(steps), wanted.data_ptr(), limit, drafted.data_ptr(), longest
        )
        del kept
        if not finite:
            raise FloatingPointError("a row of logits holds NaN or Inf")
        learn_drafts(reserved, drafted, steps, held)
        return drafted

    def _run_again(self, tokens: Tensor, chain: Reserved, cache: KeyValueCache) -> None:
        positions = torch.arange(chain.start, chain.start + chain.count)
        batch, kept = self._batches.of([chain], tokens, positions, cache)
        angles = self._angles(chain.start + chain.count - 1)
        handle = self._runner(cache).handle
        require().specpress_forward(handle, byref(batch), byref(angles), None, 0, None, None)
        del kept

    def _angles(self, position: int) -> AnglesStruct:
        """What depends on positions up to this one; the tables are held by `_rotary`."""
        tables = self._rotary.upto(position)
        columns = [(c_void_p * len(tables))(*[pair[part].data_ptr() for pair in tables]) for part in (0, 1)]
        return AnglesStruct(*columns, _address(self._rotary.growth(position)))

    def _runner(self, cache: KeyValueCache) -> "_Native":
        kind = cache.format.kind
        if kind not in self._native or not self._native[kind].fits(cache.formats):
            self._native[kind] = _Native(self, cache.formats)
        return self._native[kind]


class _Native:
    """The native decoder for one kind of cache, and the structs it was made from."""

    def __init__(self, decoder: NativeDecoder, rotated: int, form: CacheFormat):
        """`rotated`: dimensions of a head that positions turn."""
        a, parts, kernel = decoder.architecture, decoder.parts, decoder.kernel
        self.factor, self._parts, self._pool = form.key_factor, parts, pool(kernel.threads)
        factors = None if form.key_factor is None else form.key_factor.float().contiguous()
        layers = (LayerStruct * len(parts.blocks))()
        self._architecture, self._kept = a, list[Any]([layers, factors])
        for layer, block in zip(layers, parts.blocks, strict=True):
            self._fill(layer, block)
        model = ModelStruct(
            heads=HeadsStruct(
                a.heads, a.kv_heads, a.head_dim, rotated, CACHES[form.kind], _address(factors), form.value_dim
            ),
            layers=len(layers),
            hidden=a.hidden,
            intermediate=max(
                _weight(mlp.down).shape[1]
                for block in parts.blocks
                for mlp in (block.mlp.mlps if isinstance(block.mlp, Mixture) else (block.mlp,))
            ),
            vocabulary=a.vocab,
            activation=ACTIVATIONS[a.activation],
            gated=a.gated,
            layer_norm=a.norm == "layer",
            parallel=a.parallel,
            norm_of_heads=a.query_key_span == "heads",
            norm_rotated=a.query_key_norm_rotated,
            tables=len({kind for kind in a.rotations if kind is not None}),
            chunked=a.chunked,
            norm_eps=a.norm_eps,
            embedding_scale=a.embedding_scale,
            attention_scaling=a.scaling,
            residual_scale=a.residual_scale,
            logits_scale=a.logits_scale,
            softcap=a.softcap,
            final_softcap=a.final_softcap,
            layer=layers,
            norm=_norm(parts.norm),
            head=pointer(_weight(parts.head).struct),
            embedding=None if parts.embedding is None else parts.embedding.data_ptr(),
            embedding_type=0 if parts.embedding is None else _EMBEDDINGS[parts.embedding.dtype],
            positions=_address(parts.positions),
        )
        self.handle = require().specpress_decoder_new(byref(model), PATHS[kernel.name], self._pool.handle)
        if self.handle is None:
            raise UserError("config.json: heads, sizes and experts do not belong together, or are beyond the kernels'")
        weakref.finalize(self, require().specpress_decoder_free, self.handle)

    def _fill(self, layer: LayerStruct, block: Block) -> None:
        layer.input_norm, layer.attention_norm = _norm(block.input_norm), _norm(block.attention_norm)
        layer.mlp_norm, layer.output_norm = _norm(block.mlp_norm), _norm(block.output_norm)
        layer.qkv = self._projection(block.attention.qkv)
        layer.out = pointer(_weight(block.attention.out).struct)
        if isinstance(block.attention, ShortConvolution):
            layer.convolution = pointer(self._convolution(block.attention))
        elif isinstance(block.attention, DeltaRule):
            layer.delta = pointer(self._delta(block.attention))
        else:
            self._attention(layer, block.attention)
        if isinstance(block.mlp, Mixture):
            layer.mixture = pointer(self._mixture(block.mlp))
            layer.parameters = _address(block.mlp.experts[0].parameters)
        else:
            layer.gate_up = self._projection(block.mlp.gate_up)
            layer.down = pointer(_weight(block.mlp.down).struct)
            layer.parameters = _address(block.mlp.parameters)

    def _attention(self, layer: LayerStruct, attention: Attention) -> None:
        a = self._architecture
        layer.query_norm = self._of_heads(attention.q_norm, a.heads)
        layer.key_norm = self._of_heads(attention.k_norm, a.kv_heads)
        layer.sinks = _address(attention.sinks)
        if attention.gate is not None:
            layer.gate = pointer(_weight(attention.gate).struct)
        if attention.latent is not None:
            layer.latent = pointer(self._latent(attention.latent))
        layer.window = attention.window or 0
        layer.rotary, layer.grows = -1 if attention.rotary is None else attention.rotary, attention.grows

    def _convolution(self, how: ShortConvolution) -> ConvolutionStruct:
        self._kept.append(ConvolutionStruct(_address(how.taps), _address(how.bias), len(how.taps)))
        found: ConvolutionStruct = self._kept[-1]
        return found

    def _delta(self, how: DeltaRule) -> DeltaStruct:
        d = self._architecture.delta
        assert d is not None
        vectors = [_address(part) for part in (how.taps, how.step, how.rate, how.query, how.key, how.norm)]
        sizes = d.taps, d.key_heads, d.value_heads, d.key, d.value
        self._kept.append(DeltaStruct(*vectors, *sizes, 1e-6 / d.key))
        found: DeltaStruct = self._kept[-1]
        return found

    def _of_heads(self, weight: Tensor | None, heads: int) -> int | None:
        """The address of a weight for every head, one after the other."""
        if weight is None:
            return None
        size = heads * self._architecture.head_dim
        whole = weight if weight.numel() == size else weight.repeat(heads)
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
            None if heads.query_norm is None else _address(heads.query_norm.weight),
            None if heads.query is None else pointer(_weight(heads.query).struct),
            _address(heads.norm.weight),
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
            _address(mixture.correction),
            how.scaled_inputs,
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
        )
        self._kept += [gate_up, down, struct]
        return struct


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else int(tensor.data_ptr())


def _norm(norm: Norm | None) -> NormStruct:
    return NormStruct() if norm is None else NormStruct(_address(norm.weight), _address(norm.bias))


def _weight(layer: Any) -> NativeWeight:
    """Native decoders are made of native layers."""
    weight: NativeWeight = layer.weight
    return weight
