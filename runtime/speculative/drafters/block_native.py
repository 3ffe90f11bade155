"""The network of the drafter `block` and the growth of its trees in one native call a round (native/block_draft.h)."""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import byref, pointer
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.contract import integers
from runtime.kernels.native_linear import NativeLinear
from runtime.model.layers import Linear
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


@dataclass
class NativeText:
    """Keys and values of a text's tokens (layers, 2, capacity, kv_heads · head_dim), of which `held` are there, and
    the last fused state (hidden,); all float32."""

    keys_values: Tensor
    last: Tensor
    held: int = 0


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
        memory = (network.memory.of_token, network.memory.of_memory, network.memory.gates, network.memory.adds, sure)
        struct = BlockNetworkStruct(
            *(len(about.taps), about.hidden_size, about.length, about.layers, about.heads, about.kv_heads),
            *(about.head_dim, about.intermediate_size, about.window, about.rank, about.vocab_size, about.logits),
            about.norm_eps,
            *(self._at(part) for part in (network.tap_norms, network.fuse_norm, network.places, network.norm)),
            *(self._weight(layer) for layer in (network.fuse, network.common, network.of_row, network.head)),
            None if network.frequent is None else self._weight(network.whole),
            None if network.frequent is None else self._at(torch.from_numpy(network.frequent)),
            ctypes.addressof(layers),
            *(self._at(torch.from_numpy(part)) for part in memory),
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
        shape = about.layers, 2, 2 * about.window, about.kv_heads * about.head_dim
        return NativeText(torch.empty(shape), torch.empty(about.hidden_size))

    def draft(self, asked: Sequence[Asked], length: int, growth: Growth) -> tuple[list[Draft], list[Places]]:
        """A tree for each draft with a budget (else an empty one), and the places of all, which are good until the next
        call.

        Raises UserError where logits are no numbers.
        """
        count = len(asked)
        self._reach(max(one.end for one in asked) + length)
        ids = torch.tensor([one.token for one in asked])
        embedded = self.network.normed_embedding(ids)
        texts, alive = (BlockTextStruct * count)(), list[Tensor]()
        for i, (struct, one) in enumerate(zip(texts, asked, strict=True)):
            struct.keys_values, struct.last = one.text.keys_values.data_ptr(), one.text.last.data_ptr()
            struct.capacity, struct.held, struct.end = one.text.keys_values.shape[2], one.text.held, one.end
            if one.unread is not None:
                states, read_at = one.unread[0], integers(one.unread[1])
                struct.unread, struct.at, struct.fresh = states.data_ptr(), read_at.data_ptr(), len(read_at)
                alive.append(read_at)
            struct.embedded, struct.token, struct.budget = embedded[i].data_ptr(), one.token, one.budget
        rows = count * length
        found = self._room(rows)
        most = max(1, *(one.budget for one in asked))
        tokens, parents = (np.empty((count, most), np.int64) for _ in range(2))
        counts = np.zeros(count, np.int64)
        places, how = BlockPlacesStruct(*(part.ctypes.data for part in found)), BlockGrowthStruct(*astuple(growth))
        trees = BlockTreesStruct(tokens.ctypes.data, parents.ctypes.data, counts.ctypes.data, most)
        finite = require().specpress_block_draft(
            self._handle,
            *(part.data_ptr() for part in self._turns),
            *(texts, count, length, byref(how), byref(places), byref(trees)),
        )
        for struct, one in zip(texts, asked, strict=True):
            one.text.held = struct.held
        if not finite:
            raise not_finite("draft")
        drafts = [Draft(tokens[i, :n].tolist(), parents[i, :n].tolist()) for i, n in enumerate(counts.tolist())]
        parts = [slice(i * length, (i + 1) * length) for i in range(count)]
        return drafts, [Places(*(each[part] for each in found)) for part in parts]

    def _room(self, rows: int) -> list[Floats]:
        """Where so many rows are written. Kept: a large vocabulary's logits would take new pages each time."""
        if not self._places or len(self._places[0]) < rows:
            about = self.network.about
            sizes = about.hidden_size, 2 * about.rank, about.logits
            self._places = [np.empty((rows, size), np.float32) for size in sizes]
        return [part[:rows] for part in self._places]

    def _reach(self, positions: int) -> None:
        """Makes angles for so many positions."""
        if positions > len(self._turns[0]):
            self._turns = self.network.turns(torch.arange(max(positions, 2 * len(self._turns[0]))))

    def _at(self, tensor: Tensor) -> int:
        kept = tensor.contiguous()
        self._kept.append(kept)
        return int(kept.data_ptr())

    def _weight(self, layer: Linear) -> Any:
        assert isinstance(layer, NativeLinear)
        self._kept.append(layer.weight)
        return pointer(layer.weight.struct)
