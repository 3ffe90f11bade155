"""Where the network of the drafter `block` begins: as the target's last layer, where that is built like its own.

Rows then become logits in a way that the target's head knows already, and fused states are what that layer read. What
it reads at the anchor is not known to a drafter: rows begin as the nearest that the anchor's token and the last fused
state say of it, by least squares. Layers above the first begin at random.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from compress.block_draft.network import BlockNetwork
from runtime import formats
from runtime.checkpoints.architecture import describe
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.open import open_checkpoint

# Families whose layers are of attention and a gated MLP with SiLU, each behind an RMS norm, and of nothing else.
_LIKE_OURS = ("llama", "mistral")
# What is added to the squares of what rows are fitted by, as a share of their mean.
_RIDGE = 1e-3


def last_layer(model: Path) -> Mapping[str, Tensor] | None:
    """Weights of a model's last layer by the names that the network has for its own, and the final norm's; None where
    it is built otherwise."""
    checkpoint = open_checkpoint(model)
    found = describe(checkpoint.config)
    if found is None or found.model_type not in _LIKE_OURS:
        return None
    names, place = found.names, found.names.block.format(found.layers - 1)
    matrices = dict(zip(("query", "key", "value", "gate", "up"), (*names.qkv, *names.gate_up), strict=True))
    matrices |= {"output": names.out, "down": names.down}
    weights = {kind: _matrix(checkpoint, f"{place}.{name}") for kind, name in matrices.items()}
    for kind, name in (("attention_norm", names.input_norm), ("mlp_norm", names.mlp_norm)):
        weights[kind] = checkpoint.tensor(f"{place}.{name}.weight").float() + found.norm_offset
    return weights | {"norm": checkpoint.tensor(f"{names.norm}.weight").float() + found.norm_offset}


@torch.no_grad()
def begin(network: BlockNetwork, layer: Mapping[str, Tensor], tokens: Tensor, states: Tensor) -> bool:
    """Gives the network's first layer these weights, fused states as the last but one of what it reads, and rows as the
    nearest to that.

    tokens  (B, T) int64 of some windows, and their states (B, T, taps · hidden).

    False, with nothing changed, where the network has other sizes.
    """
    about, first = network.about, network.layers[0]
    own = dict(first.named_parameters())
    if any(own[name].shape != tensor.shape for name, tensor in layer.items() if name in own) or len(about.taps) < 2:
        return False
    for name, parameter in own.items():
        parameter.copy_(layer[name])
    network.norm.copy_(layer["norm"])
    network.fuse_norm.copy_(layer["attention_norm"])
    hidden, tap = about.hidden_size, len(about.taps) - 2
    network.fuse.mul_(0.1)
    network.fuse[:, tap * hidden : (tap + 1) * hidden] += torch.eye(hidden)
    stream = states[..., tap * hidden : (tap + 1) * hidden]
    network.begun, network.spread = True, float(stream.std())
    told = torch.cat((network.embedded(tokens[:, 1:]), network.fused(states[:, :-1])), dim=-1).flatten(0, 1)
    _fit(network, told, stream[:, 1:].flatten(0, 1) / network.spread)
    return True


def _fit(network: BlockNetwork, told: Tensor, stream: Tensor) -> None:
    """Rows of the first place: the nearest to the stream (n, hidden) that the anchor's token and the last fused state,
    told (n, 2 · hidden), say; those of the others differ by what they began with."""
    mean, centre = told.mean(0), stream.mean(0)
    told, stream = told - mean, stream - centre
    squares = told.t() @ told
    squares.diagonal().add_(_RIDGE * squares.diagonal().mean())
    found = torch.linalg.solve(squares, told.t() @ stream).t()
    network.anchor.copy_(found[:, : network.about.hidden_size])
    network.last.copy_(found[:, network.about.hidden_size :])
    network.places[0] = 0.0
    network.places.add_(centre - found @ mean)


def _matrix(checkpoint: Checkpoint, name: str) -> Tensor:
    found = checkpoint.weight(name)
    return found.float() if isinstance(found, Tensor) else formats.dequantize(found)
