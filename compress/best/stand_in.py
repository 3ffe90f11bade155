"""A model of random codes, in memory: it takes the time of one that was compressed, which takes minutes to make."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from compress.best.space import Assignment, Option, Unit
from runtime.checkpoints.directory import Checkpoint
from runtime.formats import trellis
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import round_scale
from runtime.model.build import build
from runtime.model.load import Model, own_architecture


class _Drawn:
    """A checkpoint, but that some layers' weights are random codes."""

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, tuple[tuple[int, int], Option]]) -> None:
        self._checkpoint, self._options = checkpoint, options
        self.taken = set[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def weight(self, prefix: str, unpack: bool = True) -> PackedWeight | torch.Tensor:
        """See Checkpoint."""
        if prefix not in self._options:
            return self._checkpoint.weight(prefix, unpack)
        self.taken.add(prefix)
        shape, option = self._options[prefix]
        return random_weight(shape, option, torch.float32)


def stand_in(model: Model, checkpoint: Checkpoint, units: Sequence[Unit], assignment: Assignment) -> Model | None:
    """What the units' assignment would be, built on the kernels of `model`, the original, and its other weights.

    None where the decoder names layers otherwise than the units do, so that nothing can be put in their places.
    """
    architecture = own_architecture(model.config)
    if architecture is None:
        return None
    options = {
        prefix: (shape, assignment[unit.name])
        for unit in units
        if not assignment[unit.name].keeps
        for prefix, shape in zip(unit.prefixes, unit.shapes, strict=True)
    }
    drawn = _Drawn(checkpoint, options)
    decoder: Any = model.decoder
    made = build(cast(Checkpoint, drawn), architecture, model.config, decoder.kernel, decoder.device)
    return Model(made, model.path, model.config) if drawn.taken == set(options) else None


def random_weight(shape: tuple[int, int], option: Option, dtype: torch.dtype) -> PackedWeight | torch.Tensor:
    """A weight (N, K): what is in it changes no product's time. `dtype` is of one that is kept."""
    n, k = shape
    drawn = torch.Generator().manual_seed(0)
    if option.keeps:
        return torch.randn(n, k, generator=drawn).mul_(k**-0.5).to(dtype)
    scheme = option.stored_as
    if option.has_tiles:
        return trellis.random_weight(shape, scheme.bits)
    half = 1 << scheme.bits - 1
    codes = torch.randint(1 - half, half, (n, k), dtype=torch.int8, generator=drawn)
    scale = torch.rand(n, k // (scheme.group_size or k), generator=drawn).add_(0.5).div_(half * k**0.5)
    return PackedWeight(scheme, codes, round_scale(scale, torch.bfloat16))
