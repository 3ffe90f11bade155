"""Random models of a shape, made on the device itself: no files, no transfers, the loader's own way otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.bench.random_models import (
    CODES,
    SCHEMES,
    SHAPES,
    Shape,
    block_layers,
    described,
    require_offered,
    unit_scale,
)
from runtime.checkpoints.directory import Checkpoint
from runtime.errors import UserError
from runtime.formats import fp8
from runtime.formats.packed import PackedWeight
from runtime.kernels.dispatch import choose
from runtime.model.build import build
from runtime.model.layers import linears
from runtime.model.load import Model

# fp8 is for GPUs: the CPU benchmarks' shapes do without.
DEVICE_SCHEMES = (*SCHEMES, "fp8")


@dataclass(frozen=True)
class RandomCheckpoint(Checkpoint):
    """A checkpoint without files, whose tensors are drawn when they are asked for: the same ones for the same seed."""

    shape_of: Shape = SHAPES["pair"]
    scheme: str = "bf16"
    head: str = "int8"
    device: str = "cpu"
    seed: int = 0

    def names(self) -> list[str]:
        """Of what there is besides the layers' weights: the decoder asks for biases by them."""
        biased = [
            f"model.layers.{i}.self_attn.{part}_proj.bias"
            for i in range(self.shape_of.architecture.layers if self.shape_of.biased else 0)
            for part in "qkv"
        ]
        return ["lm_head.weight", *biased]

    def tensor(self, name: str) -> Tensor:
        """The embedding, a norm or a bias."""
        a = self.shape_of.architecture
        if name.endswith("norm.weight"):
            return torch.ones(a.hidden, device=self.device)
        if name == "model.embed_tokens.weight":
            return self._floats(a.vocab, a.hidden, name)
        layer = name.removesuffix(".bias").split(".", 3)[-1]
        outputs, inputs = block_layers(self.shape_of)[layer]
        return self._floats(outputs, inputs, name)[:, 0].float()

    def weight(self, prefix: str, unpack: bool = True) -> PackedWeight | Tensor:
        """A layer's weight, of variance 1 / inputs, in the scheme."""
        a = self.shape_of.architecture
        if prefix == "lm_head":
            kind, (outputs, inputs) = ("int8" if self.head == "int8" else self.scheme), (a.vocab, a.hidden)
            if kind not in ("int8", "f32"):
                kind = "bf16"
        else:
            kind, (outputs, inputs) = self.scheme, block_layers(self.shape_of)[prefix.split(".", 3)[-1]]
        return random_weight(kind, outputs, inputs, self._generator(prefix))

    def _floats(self, outputs: int, inputs: int, name: str) -> Tensor:
        kind = "f32" if self.scheme == "f32" else "bf16"
        found = random_weight(kind, outputs, inputs, self._generator(name))
        assert isinstance(found, Tensor)
        return found

    def _generator(self, name: str) -> torch.Generator:
        place = int.from_bytes(name.encode()[-7:], "little") ^ len(name) << 40
        return torch.Generator(self.device).manual_seed(self.seed + place)


def random_weight(scheme: str, outputs: int, inputs: int, generator: torch.Generator) -> PackedWeight | Tensor:
    """As `random_models.random_weight`, drawn on the generator's device: codes uniform, scales within a quarter."""
    device = generator.device
    if scheme in ("f32", "bf16"):
        dtype = torch.float32 if scheme == "f32" else torch.bfloat16
        spread = (3.0 / inputs) ** 0.5
        return torch.empty(outputs, inputs, dtype=dtype, device=device).uniform_(-spread, spread, generator=generator)
    if scheme == "fp8":
        drawn = random_weight("bf16", outputs, inputs, generator)
        assert isinstance(drawn, Tensor)
        return fp8.pack(drawn)
    group = next((size for size in (128, 64, 32) if inputs % size == 0), 0) if scheme == "int4" else None
    if group == 0:
        raise UserError(f"int4 groups of 32 do not divide rows of {inputs} inputs; choose another shape")
    about = described(scheme, group)
    first, last = CODES[scheme]
    codes = torch.randint(first, last + 1, (outputs, inputs), dtype=torch.int8, device=device, generator=generator)
    groups = inputs // about.group_size if about.group_size else 1
    scales = torch.full((outputs, groups), unit_scale(scheme, inputs), device=device)
    if scheme != "ternary":
        scales *= torch.empty_like(scales).uniform_(0.75, 1.25, generator=generator)
    return PackedWeight(about, codes, scales)


def random_model(
    shape: str,
    scheme: str,
    device: torch.device,
    kernels: str = "auto",
    head: str = "int8",
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> Model:
    """A model of a published shape with random weights, in memory only. It has no tokenizer.

    head     "int8", or "keep": as float.
    changes  keys of the configuration to replace, to make a model of fewer layers, say.

    Raises UserError for a name that is not offered, and where the device lacks the memory.
    """
    require_offered(shape, scheme, head, DEVICE_SCHEMES)
    from transformers import AutoConfig

    about = SHAPES[shape]
    about = replace(about, config={**about.config, "tie_word_embeddings": False, **(changes or {})})
    values = dict(about.config)
    checkpoint = RandomCheckpoint(Path(shape), values, None, about, scheme, head, str(device), seed)  # type: ignore[arg-type]
    config = AutoConfig.for_model(**values)
    config.dtype = torch.float32 if scheme == "f32" else torch.bfloat16
    kernel = choose(kernels, str(device))
    return Model(build(checkpoint, about.architecture, config, kernel, device), Path(shape), config)


def read_bytes(model: Model) -> int:
    """Bytes of weights that a forward reads: all but the embedding, of which it takes a row for each token."""
    decoder: Any = model.decoder
    table = model.config.vocab_size * model.config.hidden_size
    wide = getattr(model.config, "dtype", None) == torch.float32
    # What a layer that libraries run holds beside the weight that this many rows read.
    idle = sum(getattr(layer, "idle_bytes", 0) for layer in linears(decoder.parts))
    return int(decoder.weight_bytes) - idle - table * (4 if wide else 2)
