"""Tensors of blocks that run which no part of the decoder reads: what they were trained for is then left out."""

import warnings
from collections.abc import Iterator

from torch import Tensor

from runtime.checkpoints.record import Architecture
from runtime.checkpoints.safetensors import Entry, Shards

# What layers are made of; formats of packed weights have more beside it, each read by who needs it.
_TRAINED = (".weight", ".bias")
# Masks, which older files hold.
_BUFFERS = (".attn.bias", ".attention.bias", ".self_attn.bias")
_SHOWN = 3


class Noted(Shards):
    """Another's tensors, and which of them were asked for or looked for."""

    def __init__(self, shards: Shards):
        self.directory, self.files, self._shards = shards.directory, shards.files, shards
        self.found = set[object]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def __contains__(self, name: object) -> bool:
        self.found.add(name)
        return name in self._shards

    def entry(self, name: str) -> Entry:
        """See Shards."""
        self.found.add(name)
        return self._shards.entry(name)

    def __getitem__(self, name: str) -> Tensor:
        self.found.add(name)
        return self._shards[name]


def warn_of_unread(where: str, noted: Noted, architecture: Architecture) -> None:
    """Warns of tensors in the blocks that run which were not read, as transformers does: a configuration that does not
    belong to its weights runs all the same, and writes nonsense.

    where  the checkpoint's name. Tensors outside the blocks, such as towers and draft heads, are not this decoder's.
    """
    a, names = architecture, architecture.names
    blocks = [f"{names.block.format(number)}." for number in range(a.layers)]
    # Layers that read another's keys may come with the keys that they were to have.
    shared = [
        blocks[n] + part for n in range(a.layers) if a.source(n) != n for part in (*names.qkv[1:], names.key_norm)
    ]
    left = [
        name
        for name in noted
        if name.startswith(tuple(blocks))
        and name.endswith(_TRAINED)
        and not (name in noted.found or name.endswith(_BUFFERS) or name.startswith(tuple(shared)))
    ]
    if not left:
        return
    shown = ", ".join(left[:_SHOWN]) + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")
    warnings.warn(
        f"{where}: {shown}: no layer reads them; compare config.json with what the weights were trained for",
        stacklevel=2,
    )
