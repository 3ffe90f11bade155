"""The Llama family in one native call per forward: decoder.py's meaning, with nothing of Python inside the layers."""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, pointer
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.blocks import Block, Mixture, Mlp
from runtime.cache import KeyValueCache
from runtime.errors import UserError
from runtime.family import Architecture
from runtime.kernels.dispatch import Joined, Kernel
from runtime.kernels.native.binding import (
    CACHES,
    PATHS,
    BatchStruct,
    HeadsStruct,
    LayerStruct,
    MixtureStruct,
    ModelStruct,
    Pool,
    ProjectionStruct,
    StoreStruct,
    WeightsStruct,
    pool,
    require,
)
from runtime.kernels.native.layers import NativeLinear, WeightPointer, project
from runtime.kv import CacheKind
from runtime.layout import Reserved, reserve
from runtime.paged import new_cache
from runtime.rotary import RotaryTable
from runtime.rows import Cache, Out, Rows

_EMBEDDINGS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT64 = np.dtype(np.int64)
# Dimensions of a head (attention.cpp) and experts of a layer (rows.cpp) that the kernels have room for.
MOST = 1024


class NativeDecoder:
    """A Decoder (rows.py) on native kernels: a row's bits are the same at every width, on any number of threads."""

    def __init__(
        self,
        architecture: Architecture,
        config: Any,
        embedding: Tensor | None,
        blocks: tuple[Block, ...],
        norm: Tensor,
        head: NativeLinear,
        kernel: Kernel,
    ):
        """`embedding` None: its rows are the head's (tied, float). Raises UserError for sizes beyond the kernels'."""
        experts = 0 if architecture.experts is None else architecture.experts.count
        for key, found in (("head_dim", architecture.head_dim), ("the number of experts", experts)):
            if found > MOST:
                raise UserError(
                    f"config.json: {key} is {found}, and the native kernels hold at most {MOST};"
                    " use kernels='reference'"
                )
        if embedding is not None and embedding.dtype not in _EMBEDDINGS:
            embedding = embedding.float()
        self.architecture = architecture
        self.vocab_size, self.hidden_size = architecture.vocab, architecture.hidden
        self.max_positions, self.exact, self.device = architecture.max_positions, True, torch.device("cpu")
        self.kernels, self.threads = kernel.name, kernel.threads
        self._rotary = RotaryTable(config, self.device)
        self._pool: Pool = pool(kernel.threads)
        self._parts = _Parts(embedding, blocks, norm, head)
        rotated = 2 * self._rotary.upto(0)[0].shape[1]
        self._native: dict[CacheKind, _Native] = {}
        self._make = lambda kind, factor: _Native(architecture, self._parts, rotated, kind, factor, kernel, self._pool)
        self._zeros = np.zeros(0, dtype=_INT64)
        self._chain = np.zeros(0, dtype=_INT64)

    def new_cache(self, kind: CacheKind = "float32", pages: int | None = None) -> KeyValueCache:
        """An empty cache that holds keys and values as float32, int8 or int4.

        `pages` of 64 tokens, shared by all requests (PagedCache); None: memory for each request (ContiguousCache).
        """
        a = self.architecture
        return new_cache(a.layers, a.kv_heads, a.head_dim, self.device, kind, pages)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None = None) -> Out:
        """See rows.Decoder. Raises ValueError for rows that contradict the cache, or tokens outside the vocabulary."""
        if not isinstance(cache, KeyValueCache):
            raise TypeError(f"this decoder needs the cache of its new_cache(), not {type(cache).__name__}")
        count = len(rows)
        if len(tokens) != count:
            raise ValueError(f"{len(tokens)} tokens for {count} rows")
        a = self.architecture
        if (cache.layers, cache.kv_heads, cache.head_dim) != (a.layers, a.kv_heads, a.head_dim):
            raise ValueError(
                f"this cache is another model's: it has {cache.layers} layers of {cache.kv_heads} heads of"
                f" {cache.head_dim}, and this model {a.layers} of {a.kv_heads} of {a.head_dim}"
            )
        ids = _integers("tokens", tokens)
        at = np.arange(count) if logits_at is None else _integers("logits_at", logits_at)
        if count == 0:
            return Out(torch.empty((0, self.vocab_size)), torch.empty((0, self.hidden_size)))
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(f"token ids must lie in 0..{self.vocab_size - 1}, found {ids.min()}..{ids.max()}")
        if len(at) and (at.min() < 0 or at.max() >= count):
            raise ValueError(f"logits_at must lie in 0..{count - 1}, found {at.min()}..{at.max()}")
        position = _integers("positions", rows.position)
        reserved = reserve(rows, cache)
        batch, kept = self._batch(reserved, ids, position, cache)
        cos, sin = self._rotary.upto(int(position.max()))
        # Uninitialised: the kernels write every element.
        logits, hidden = torch.empty((len(at), self.vocab_size)), torch.empty((len(at), self.hidden_size))
        require().specpress_forward(
            self._runner(cache).handle,
            byref(batch),
            cos.data_ptr(),
            sin.data_ptr(),
            at.ctypes.data,
            len(at),
            hidden.data_ptr(),
            logits.data_ptr(),
        )
        del kept
        return Out(logits, hidden)

    def _runner(self, cache: KeyValueCache) -> "_Native":
        if cache.kind not in self._native or self._native[cache.kind].factor is not cache.quantizer.key_factor:
            self._native[cache.kind] = self._make(cache.kind, cache.quantizer.key_factor)
        return self._native[cache.kind]

    def _batch(
        self, reserved: Sequence[Reserved], ids: Any, position: Any, cache: KeyValueCache
    ) -> tuple[BatchStruct, list[Any]]:
        """The rows for the kernels, and what must stay alive during the call."""
        count = len(ids)
        if len(self._zeros) < count:
            self._zeros = np.zeros(2 * count, dtype=_INT64)
            self._chain = np.full(2 * count, -1, dtype=_INT64)
        stores = (StoreStruct * len(reserved))(*[StoreStruct(*cache.store(r.request).pointers) for r in reserved])
        request, slot, tail_from, tail_at, tail = self._zeros, position, self._zeros, self._chain, self._zeros
        if len(reserved) > 1:
            request = np.repeat(np.arange(len(reserved)), [r.count for r in reserved])
        if any(r.parents is not None for r in reserved):
            slot, tail_from, tail_at, tail = _tails(reserved, position)
        batch = BatchStruct(
            count,
            ids.ctypes.data,
            request.ctypes.data,
            position.ctypes.data,
            slot.ctypes.data,
            tail_from.ctypes.data,
            tail_at.ctypes.data,
            tail.ctypes.data,
            stores,
        )
        return batch, [request, slot, tail_from, tail_at, tail, stores]


def _integers(name: str, values: Tensor) -> Any:
    """(n,) int64 for the kernels. Raises ValueError for other shapes and for what are no integers."""
    found = values.numpy()
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers (n,), found {values.dtype} {list(values.shape)}")
    return np.ascontiguousarray(found, dtype=_INT64)


def _tails(reserved: Sequence[Reserved], position: Any) -> tuple[Any, Any, Any, Any]:
    """Per row its slot, where its own list of slots begins (position, and index in the last array; −1: no list)."""
    slot, tail_from = position.copy(), np.zeros(len(position), dtype=_INT64)
    tail_at = np.full(len(position), -1, dtype=_INT64)
    tail: list[int] = []
    for r in reserved:
        if r.parents is None:
            continue
        paths: list[list[int]] = []
        for index, parent in enumerate(r.parents):
            paths.append([*(paths[parent] if parent >= 0 else []), r.start + index])
            row = r.first + index
            slot[row], tail_from[row], tail_at[row] = r.start + index, r.start, len(tail)
            tail += paths[-1]
    return slot, tail_from, tail_at, np.array(tail, dtype=_INT64)


@dataclass(frozen=True, eq=False)
class _Parts:
    """Everything that the native model points into."""

    embedding: Tensor | None
    blocks: tuple[Block, ...]
    norm: Tensor
    head: NativeLinear


class _Native:
    """The native decoder for one kind of cache, and the structs it was made from."""

    def __init__(
        self,
        a: Architecture,
        parts: _Parts,
        rotated: int,
        kind: CacheKind,
        factor: Tensor | None,
        kernel: Kernel,
        threads: Pool,
    ):
        self.factor, self._parts, self._pool = factor, parts, threads
        factors = None if factor is None else factor.float().contiguous()
        layers = (LayerStruct * len(parts.blocks))()
        self._kept: list[Any] = [layers, factors]
        for layer, block, window in zip(layers, parts.blocks, a.windows, strict=True):
            self._fill(layer, block, window)
        heads = HeadsStruct(
            a.heads,
            a.kv_heads,
            a.head_dim,
            rotated,
            CACHES[kind],
            None if factors is None else factors.data_ptr(),
        )
        model = ModelStruct(
            heads=heads,
            layers=len(layers),
            hidden=a.hidden,
            intermediate=max(_linear(mlp.down).weight.shape[1] for block in parts.blocks for mlp in _mlps(block)),
            vocabulary=a.vocab,
            gelu=a.activation == "gelu_tanh",
            norm_eps=a.norm_eps,
            norm_offset=a.norm_offset,
            embedding_scale=a.embedding_scale,
            attention_scaling=a.head_dim**-0.5,
            layer=layers,
            norm=parts.norm.data_ptr(),
            head=pointer(parts.head.weight.struct),
            embedding=None if parts.embedding is None else parts.embedding.data_ptr(),
            embedding_type=0 if parts.embedding is None else _EMBEDDINGS[parts.embedding.dtype],
        )
        self.handle = require().specpress_decoder_new(byref(model), PATHS.index(kernel.name), threads.handle)
        weakref.finalize(self, require().specpress_decoder_free, self.handle)

    def _fill(self, layer: LayerStruct, block: Block, window: int | None) -> None:
        layer.input_norm, layer.mlp_norm = block.input_norm.data_ptr(), block.mlp_norm.data_ptr()
        attention = block.attention
        if attention.q_norm is not None and attention.k_norm is not None:
            layer.query_norm, layer.key_norm = attention.q_norm.data_ptr(), attention.k_norm.data_ptr()
        layer.qkv = self._projection(attention.qkv)
        layer.out = pointer(_linear(attention.out).weight.struct)
        layer.window = window or 0
        if isinstance(block.mlp, Mixture):
            layer.mixture = pointer(self._mixture(block.mlp))
        else:
            layer.gate_up = self._projection(block.mlp.gate_up)
            layer.down = pointer(_linear(block.mlp.down).weight.struct)

    def _projection(self, joined: Joined) -> ProjectionStruct:
        projection = project([_linear(part).weight for part in joined.parts])
        self._kept.append(projection)
        return projection

    def _mixture(self, mixture: Mixture) -> MixtureStruct:
        count = len(mixture.experts)
        gate_up = (ProjectionStruct * count)(*[self._projection(e.gate_up) for e in mixture.experts])
        down = (WeightPointer * count)(*[pointer(_linear(e.down).weight.struct) for e in mixture.experts])
        struct = MixtureStruct(
            count,
            mixture.per_token,
            mixture.renormalize,
            pointer(_linear(mixture.router).weight.struct),
            ctypes.cast(gate_up, POINTER(ProjectionStruct)),
            ctypes.cast(down, POINTER(POINTER(WeightsStruct))),
        )
        self._kept += [gate_up, down, struct]
        return struct


def _linear(layer: Any) -> NativeLinear:
    if not isinstance(layer, NativeLinear):
        raise TypeError(f"a native decoder takes native layers, found {type(layer).__name__}")
    return layer


def _mlps(block: Block) -> Sequence[Mlp]:
    return block.mlp.experts if isinstance(block.mlp, Mixture) else (block.mlp,)


__all__ = ["NativeDecoder"]
