"""A draft out of its target: some of the target's blocks, with its embedding, its last norm and its head.

A start for distillation, not yet a draft: layer-skipping models need training to agree with the whole (2404.16710).
"""

import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compress.model import directory
from compress.model.structure import read_structure
from compress.prune import depth
from runtime.checkpoints.open import open_checkpoint

# Tokens that influence is measured on.
_TOKENS = 8192


@torch.no_grad()
def choose_blocks(model: Any, windows: Tensor, count: int, how: Literal["influence", "even"]) -> tuple[int, ...]:
    """Numbers of the `count` blocks to keep, ascending.

    model    a transformers causal language model; windows (E, length) int64, read for "influence" only.
    even     evenly spaced from the first on; influence: those that change their input most (depth.influence).
    """
    layers = int(model.config.num_hidden_layers)
    if not 0 < count <= layers:
        raise ValueError(f"count must be from 1 to {layers}, found {count}")
    if how == "even":
        return tuple(number * layers // count for number in range(count))
    device = next(model.parameters()).device
    some = windows[: max(1, _TOKENS // windows.shape[1])].to(device)
    states = [
        model(input_ids=window.unsqueeze(0), use_cache=False, output_hidden_states=True).hidden_states
        for window in some
    ]
    # The last block's output comes out of transformers with the final norm applied; ShortGPT measures it like that too.
    found = [depth.influence((one[block], one[block + 1]) for one in states) for block in range(layers)]
    return tuple(sorted(sorted(range(layers), key=lambda block: (-found[block], block))[:count]))


def count_of(share: float, layers: int) -> int:
    """Blocks that a share of them comes to: one at least."""
    return max(1, min(layers, math.floor(share * layers + 0.5)))


def write_draft(source: Path, kept: tuple[int, ...], out: Path, shard_bytes: int) -> None:
    """Writes `out`: the plain model in `source` with the blocks of these numbers only.

    Raises UserError for an architecture whose blocks cannot be renumbered.
    """
    checkpoint, structure = open_checkpoint(source), read_structure(source)
    dropped = frozenset(range(len(structure.layers))) - set(kept)
    structure.check_renumbering(checkpoint.names())
    short = depth.shorten_config(dict(checkpoint.config), dropped)
    names = depth.renumber(checkpoint.names(), structure.blocks_at, dropped)
    tensors = ({new: checkpoint.tensor(old)} for old, new in names.items() if not structure.is_tied(old))
    directory.write_model(tensors, source, out, shard_bytes, changes=short)
