"""Where the network of the drafter `block` begins: as the target's last layer, where that is built like its own.

Rows then become logits in a way that the target's head knows already, and fused states are what that layer read: what
is left to learn is where rows come from. Layers above the first begin at random.
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
# Standard deviation of what rows begin with, as a share of the stream's that the layer read.
_SMALL = 0.5


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
def begin(network: BlockNetwork, layer: Mapping[str, Tensor], spread: float) -> bool:
    """Gives the network's first layer these weights; its fused states begin as the last but one of what it reads.

    spread  standard deviation of the target's residual stream before the layer.

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
    for matrix in (network.anchor, network.last, network.places):
        matrix.mul_(_SMALL * spread)
    return True


def _matrix(checkpoint: Checkpoint, name: str) -> Tensor:
    found = checkpoint.weight(name)
    return found.float() if isinstance(found, Tensor) else formats.dequantize(found)
