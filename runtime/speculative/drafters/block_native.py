"""The network of the drafter `block` and the growth of its trees in one native call a round (native/block_draft.h)."""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import addressof, byref, c_int64, pointer
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.contract import integers
from runtime.kernels.native_linear import NativeLinear
from runtime.model.layers import Linear
from runtime.model.native_model import TABLES
from runtime.native.binding import PATHS, require
from runtime.native.structs import (
    BlockGrowthStruct,
    BlockLayerStruct,
    BlockNetworkStruct,
    BlockPlacesStruct,
    BlockTextStruct,
    BlockTreesStruct,
    ModelStruct,
)
from runtime.sampling.distribution import not_finite
from runtime.speculative.draft import Draft
from runtime.speculative.drafters.block_network import BlockNetwork, Floats, Places

# Positions for which angles are made at once.
_POSITIONS = 1024


class NativeText:
    """What native code keeps of one text: its `struct` says how many tokens' keys and values are held.

    keys_values  (layers, 2, capacity · kv_heads · head_dim) float32: keys by dimension, values by token.
    last         the last fused state (hidden,) float32.
    """

    def __init__(self, layers: int, capacity: int, size: int, hidden: int) -> None:
        self.keys_values, self.last = torch.empty(layers, 2, capacity * size), torch.empty(hidden)
        self.struct = BlockTextStruct(self.keys_values.data_ptr(), self.last.data_ptr(), capacity)


@dataclass(frozen=True, eq=False)
class Asked:
    """A draft that is asked for behind the token at place `end`. unread: the states that came since the last draft,
    (n, taps · hidden), and their tokens' places. budget: nodes of its tree; 0: its places alone."""

    text: NativeText
    unread: tuple[Tensor, Sequence[int]] | None
    end: int
    token: int
    budget: int


@dataclass(frozen=True)
class Growth:
    """How trees grow: the most children of a node, how many tokens of a place are looked at, below which probability
    none is worth a row, and below which one of a first token a short head is not believed."""

    branch: int
    considered: int
    worth: float
    unsure: float


@dataclass(eq=False)
class NativeBlocks:
    """A network on native kernels. Raises ValueError for one whose layers are others."""

    network: BlockNetwork
    _kept: list[Any] = field(default_factory=list)
    _places: list[Floats] = field(default_factory=list, init=False)
    _reached: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        network, about = self.network, self.network.about
        fuse = network.fuse
        if not isinstance(fuse, NativeLinear):
            raise ValueError("this network's layers are not native")
        layers = (BlockLayerStruct * about.layers)()
        for struct, layer in zip(layers, network.layers, strict=True):
            struct.attention_norm, struct.mlp_norm = self._at(layer.attention_norm), self._at(layer.mlp_norm)
            for name in ("query", "keys_values", "output", "gate_up", "down"):
                setattr(struct, name, self._weight(getattr(layer, name)))
        sure = np.concatenate([*network.memory.sure[:2], np.array(network.memory.sure[2:], np.float32)])
        embedding = network.embedding if network.embedding.dtype in TABLES else network.embedding.float()
        of_memory = np.ascontiguousarray(network.memory.of_memory.T)
        adds = torch.from_numpy(network.memory.adds).bfloat16()  # rounded to that already
        memory = (network.memory.of_token, of_memory, network.memory.gates, adds, sure)
        struct = BlockNetworkStruct(
            *(len(about.taps), about.hidden_size, about.length, about.layers, about.heads, about.kv_heads),
            *(about.head_dim, about.intermediate_size, about.window, about.rank, about.vocab_size, about.logits),
            about.norm_eps,
            *(self._at(part) for part in (network.tap_norms, network.fuse_norm, network.places, network.norm)),
            *(self._weight(layer) for layer in (network.fuse, network.common, network.of_row, network.head)),
            None if network.frequent is None else self._weight(network.whole),
            None if network.frequent is None else self._at(torch.from_numpy(network.frequent)),
            ctypes.addressof(layers),
            *(self._at(torch.as_tensor(part)) for part in memory),
            *(self._at(embedding), TABLES[embedding.dtype]),
        )
        # The workspace in which single products run has room for the widest inputs.
        widest = max(2, len(about.taps)) * about.hidden_size
        workspace = ModelStruct(
            hidden=max(widest, about.intermediate_size, about.heads * about.head_dim),
            head=self._weight(network.fuse),
            embedding_scale=1.0,
        )
        self._kept += [layers, fuse.pool]
        self._handle = require().specpress_block_new(
            byref(struct), byref(workspace), PATHS[fuse.path], fuse.pool.handle
        )
        weakref.finalize(self, require().specpress_block_free, self._handle)
        self._turns = network.turns(torch.arange(_POSITIONS))

    def text(self) -> NativeText:
        """An empty text."""
        about = self.network.about
        return NativeText(about.layers, 2 * about.window, about.kv_heads * about.head_dim, about.hidden_size)

    def draft(self, asked: Sequence[Asked], length: int, growth: Growth) -> tuple[list[Draft], list[Places | None]]:
        """A tree for each draft with a budget; for each of the others its places, which are good until the next call.

        Raises UserError where logits are no numbers.
        """
        count, most = len(asked), max(1, max(one.budget for one in asked))
        self._reach(max(one.end for one in asked) + length)
        alive: list[Tensor] = []
        for one in asked:
            struct = one.text.struct
            struct.end, struct.token, struct.budget, struct.fresh = one.end, one.token, one.budget, 0
            if one.unread is not None:
                states, read_at = one.unread
                struct.unread, struct.fresh = states.data_ptr(), len(read_at)
                if isinstance(read_at, range):
                    struct.at = self._order.data_ptr() + read_at.start * self._order.itemsize
                else:
                    alive.append(integers(read_at))
                    struct.at = alive[-1].data_ptr()
        # As structs of ctypes: to ask numpy for an address takes a microsecond.
        texts = asked[0].text.struct if count == 1 else (BlockTextStruct * count)(*(one.text.struct for one in asked))
        tokens, parents, counts = (c_int64 * (count * most))(), (c_int64 * (count * most))(), (c_int64 * count)()
        how = BlockGrowthStruct(growth.branch, growth.considered, growth.worth, growth.unsure)
        trees = BlockTreesStruct(*map(addressof, (tokens, parents, counts)), most)
        finite = require().specpress_block_draft(
            *(self._handle, *self._angles, byref(texts), count, length),
            *(byref(how), byref(self._room(count * length)), byref(trees)),
        )
        if count > 1:
            for one, struct in zip(asked, texts, strict=True):
                one.text.struct.held = struct.held
        if not finite:
            raise not_finite("draft")
        ends = [(i * most, i * most + found) for i, found in enumerate(counts)]
        drafts = [Draft(tokens[first:end], parents[first:end]) for first, end in ends]
        return drafts, [None if one.budget else self._of(i, length) for i, one in enumerate(asked)]

    def _of(self, text: int, length: int) -> Places:
        """The places of one of the texts."""
        return Places(*(each[text * length : (text + 1) * length] for each in self._places))

    def _room(self, rows: int) -> BlockPlacesStruct:
        """Where so many rows are written. Kept: a large vocabulary's logits would take new pages each time."""
        if not self._places or len(self._places[0]) < rows:
            about = self.network.about
            sizes = about.hidden_size, 2 * about.rank, about.logits
            self._places = [np.empty((rows, size), np.float32) for size in sizes]
            self._places_struct = BlockPlacesStruct(*(part.ctypes.data for part in self._places))
        return self._places_struct

    def _reach(self, positions: int) -> None:
        """Makes angles for so many positions, and their numbers."""
        if positions > self._reached:
            self._reached = max(positions, 2 * self._reached, _POSITIONS)
            self._order = torch.arange(self._reached)
            self._turns = self.network.turns(self._order)
            self._angles = [part.data_ptr() for part in self._turns]

    def _at(self, tensor: Tensor) -> int:
        kept = tensor.contiguous()
        self._kept.append(kept)
        return int(kept.data_ptr())

    def _weight(self, layer: Linear) -> Any:
        assert isinstance(layer, NativeLinear)
        self._kept.append(layer.weight)
        return pointer(layer.weight.struct)
