"""A model's own layer for multi-token prediction: one more block of its kind, built by its own record.

So whatever a model's blocks have, experts and latent attention included, its layer may have, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from runtime.cache.contiguous import KeyValueCache
from runtime.cache.slots import plan
from runtime.checkpoints.architecture import Architecture, language_model
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.model.base import BaseDecoder
from runtime.model.build import build_block
from runtime.model.layers import Parts
from runtime.model.reference import PlainTorchDecoder
from runtime.model.rotary import RotaryTables
from runtime.model.tensor_reader import TensorReader
from runtime.speculative.heads.blocks import Span

if TYPE_CHECKING:
    from runtime.model.load import Model


class CachedMemory:
    """What the layer remembers of one text, in a cache as the target's; see blocks.Memory."""

    def __init__(self, cache: KeyValueCache, capacity: int, start: int) -> None:
        self.start, self.kept = start, 0
        self._cache, self.handle = cache, cache.open(capacity)

    @property
    def end(self) -> int:
        """The position behind the last one that stays."""
        return self.start + self.kept

    def rows(self) -> int:
        """How many are held."""
        return self._cache.length(self.handle)

    def keep(self, count: int) -> None:
        """So many rows behind those that stay do, too."""
        self.kept += count

    def skip(self, count: int) -> None:
        """See TextMemory; rows that are there move up to those that follow, as positions count from one another."""
        self.start += count

    def forget(self) -> None:
        """Forgets the rows of a draft."""
        self._cache.truncate(self.handle, self.kept)

    def close(self) -> None:
        """Forgets the text."""
        self._cache.close(self.handle)


@dataclass(frozen=True)
class OwnLayer:
    """The block, and the caches of the texts that it follows."""

    decoder: PlainTorchDecoder
    cache: KeyValueCache

    def run(self, x: Tensor, spans: Sequence[Span]) -> Tensor:
        """The residual stream (T, hidden) behind the block, whose keys and values are remembered."""
        # A text whose beginning is not known stands at 0 here: positions count from one another.
        memories = [span.memory for span in spans if isinstance(span.memory, CachedMemory)]
        held = [(of.handle, of.rows(), span.count) for of, span in zip(memories, spans, strict=True)]
        rows = Rows.chains(held)
        return self.decoder.behind_blocks(x, None, rows.position, plan(rows, self.cache), self.cache)


def own_layer(folder: Path, place: str, target: "Model") -> OwnLayer:
    """The block whose tensors' names begin with `place` in a checkpoint of the target's kind.

    Raises UserError for tensors that are missing or misshapen.
    """
    decoder, checkpoint = target.decoder, open_checkpoint(folder)
    assert isinstance(decoder, BaseDecoder)
    a, config = _alone(decoder.architecture, place), language_model(target.config)
    reader = TensorReader(checkpoint, decoder.kernel, decoder.device, False, a)
    block = build_block(reader, a, 0, RotaryTables(config, a, decoder.device))
    parts = Parts(None, (block,), decoder.parts.norm, decoder.parts.head)
    layer = PlainTorchDecoder(a, config, parts, decoder.kernel)
    return OwnLayer(layer, layer.new_cache())


def _alone(a: Architecture, place: str) -> Architecture:
    """The record of a model of one block, which is as the last one of the model that attends."""
    last = a.attending[-1]
    return replace(
        a,
        layers=1,
        names=replace(a.names, block=place.rstrip(".")),
        windows=a.windows[last : last + 1],
        rotary=a.rotary[last : last + 1],
        head_shapes=a.head_shapes[last : last + 1],
        intermediates=a.intermediates[last : last + 1],
        keys_as_values=(0,) if last in a.keys_as_values else (),
        dense_layers=(),
        mixers=(),
        without_mlp=(),
        keys_of=(),
        layer_input=0,
    )
