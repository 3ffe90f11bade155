"""What all decoders on Specpress' own kernels have: weights as layers, caches, and states that are computed again."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from runtime.cache.contiguous import ContiguousCache, KeyValueCache
from runtime.cache.paged import PagedCache
from runtime.cache.quantizer import CacheFormat
from runtime.cache.slots import Reserved
from runtime.checkpoints.architecture import Architecture
from runtime.contract import UNCALIBRATED, Cache, CacheKind, CacheScheme, Out, Rows, StateKind, integers
from runtime.errors import UserError
from runtime.kernels.dispatch import Kernel
from runtime.model.layers import Parts, weight_bytes
from runtime.model.planes import upper_parts
from runtime.model.rotary import RotaryTables

# Tokens in one forward where states are computed again.
_PIECE = 512


class BaseDecoder(ABC):
    """A decoder on Specpress' own kernels: its weights as layers (`parts`), and the facts that every `Decoder` has.

    What drafts on the target's own weights (nested, medusa) takes any of these.
    """

    def __init__(
        self, architecture: Architecture, config: Any, parts: Parts, kernel: Kernel, kv: CacheScheme = UNCALIBRATED
    ):
        self.architecture, self.parts, self.kernel, self.kv = architecture, parts, kernel, kv
        self.vocab_size, self.hidden_size = architecture.vocab, architecture.hidden
        self.max_positions, self.exact, self.device = architecture.max_positions, kernel.exact, parts.norm.weight.device
        self.kernels, self.layers = kernel.name, len(parts.blocks)
        self.beyond = ""  # what to do about texts that have too few positions, where there is something
        self.taps: tuple[int, ...] = ()
        self._tapped: dict[tuple[int, ...], Self] = {}
        self._config, self._rotary = config, RotaryTables(config, architecture, self.device)

    @property
    def threads(self) -> int:
        """The native kernels' own; torch's where the kernels use those."""
        return self.kernel.threads or torch.get_num_threads()

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that the weights take."""
        return weight_bytes(self.parts)

    def upper(self) -> Self:
        """This decoder on the upper planes of its int8 weights (planes.py): no weights of its own, caches of its own.

        Raises UserError where it was not loaded with planes.
        """
        return type(self)(self.architecture, self._config, upper_parts(self.parts), self.kernel, self.kv)

    def tapped(self, taps: Sequence[int]) -> Self:
        """See contract.TakesStates; the same object for the same taps, as engines come and go."""
        wanted = tuple(taps)
        if wanted == self.taps:
            return self
        if len(set(wanted)) < len(wanted) or not all(0 <= tap <= self.layers for tap in wanted):
            raise ValueError(f"taps must be different numbers of 0..{self.layers}, found {list(wanted)}")
        if wanted not in self._tapped:
            view = type(self)(self.architecture, self._config, self.parts, self.kernel, self.kv)
            view.taps = wanted
            self._tapped[wanted] = view
        return self._tapped[wanted]

    def new_cache(
        self, kind: CacheKind = "float32", pages: int | None = None, states: StateKind = "float32"
    ) -> KeyValueCache:
        """An empty cache that holds keys and values as `kind` says, by the artifact's factors and bases (`kv`).

        `pages` of 64 tokens, shared by all requests (PagedCache); None: memory for each request (ContiguousCache).
        Raises UserError for states in other than float32 of a model whose layers carry none.
        """
        form = self._cache_format(kind, states)
        return ContiguousCache(form) if pages is None else PagedCache(form, pages)

    def _cache_format(self, kind: CacheKind, states: StateKind) -> tuple[CacheFormat, ...]:
        """One for each group of layers."""
        if states != "float32" and not self.architecture.cache_shape.state:
            raise UserError(f"no layer of this model carries a state that could be held in {states}; leave it out")
        a = self.architecture
        groups, state = a.cache_shape
        none = (None,) * len(groups)
        factors, bases = self.kv.factors(kind) or none, self.kv.bases_of(kind) or none
        values = 0 if a.latent is None else a.value_dim
        return tuple(
            CacheFormat(
                *shape, self.device, kind, factor, values, state if number == 0 else 0, basis, states, a.state_shapes
            )
            for number, (shape, factor, basis) in enumerate(zip(groups, factors, bases, strict=True))
        )

    def _recall_states(self, rows: Rows, cache: KeyValueCache) -> None:
        """Computes the states again that a request goes on from, where it was rolled back further than they are kept.

        Keys and values are written again as well, the same bits to the same slots.
        """
        for handle in dict.fromkeys(rows.request.tolist()) if cache.format.state else ():
            states = cache.states(handle)
            if states is None or states.holds(len(states.tokens)):
                continue
            states.restart()
            tokens = integers(states.tokens)
            for start in range(0, len(tokens), _PIECE):
                piece = tokens[start : start + _PIECE]
                self._run_again(piece, Reserved(handle, 0, len(piece), start, None), cache)
            states.restarted()

    @abstractmethod
    def _run_again(self, tokens: Tensor, chain: Reserved, cache: KeyValueCache) -> None:
        """Runs a chain whose slots are taken, for what it leaves in the cache."""

    @abstractmethod
    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None = None) -> Out:
        """See contract.Decoder."""
