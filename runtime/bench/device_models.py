"""Random models of a shape, made on the device itself: no files, no transfers, the loader's own way otherwise."""

from dataclasses import replace
from pathlib import Path

import torch

from runtime.bench.random_models import DEVICE_SCHEMES, NO_SHARDS, RandomCheckpoint, require_offered
from runtime.bench.shapes import SHAPES
from runtime.kernels.dispatch import choose
from runtime.model.build import build
from runtime.model.load import Model


def random_model(
    shape: str, scheme: str, device: torch.device, kernels: str = "auto", head: str = "int8", seed: int = 0
) -> Model:
    """A model of a published shape with random weights, in memory only. It has no tokenizer.

    head  "int8", or "keep": as float.

    Raises UserError for a name that is not offered, and where the device lacks the memory.
    """
    require_offered(shape, scheme, head, DEVICE_SCHEMES)
    from transformers import AutoConfig

    about = SHAPES[shape]
    about = replace(about, config={**about.config, "tie_word_embeddings": False})
    values = dict(about.config)
    checkpoint = RandomCheckpoint(Path(shape), values, NO_SHARDS, about, scheme, head, str(device), seed)
    config = AutoConfig.for_model(**values)
    config.dtype = checkpoint.dtype
    kernel = choose(kernels, str(device))
    return Model(build(checkpoint, about.architecture, config, kernel, device), Path(shape), config)
