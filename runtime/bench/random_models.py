"""Real architectures with seeded random weights: models to time, not to read. Their text means nothing.

Codes and scales are drawn directly in each format, so that a billion weights take seconds, one block at a time.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import log2
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from runtime.bench.shapes import SHAPES, Shape
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.record import Names
from runtime.checkpoints.safetensors import INDEX
from runtime.errors import UserError
from runtime.formats import fp8, hf_config, int4, int8, nf4, ternary, three_of_four, to_tensors, trellis
from runtime.formats.nf4 import Nf4Weight, double_quantize
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import Scheme
from runtime.formats.tensors import group_width, round_scale

_BOTH = ("f32", "bf16", "int8", "int4", "nf4", "ternary")
TRELLISES = {f"trellis-{bits}": bits for bits in (2, 3, 4)}
# fp8 is for GPUs, a trellis for CPUs; so is ternary-1.25, which GPUs have as ternary.
SCHEMES, DEVICE_SCHEMES = (*_BOTH, "ternary-1.25", *TRELLISES), (*_BOTH, "fp8")
HEADS = ("int8", "keep")
# The first and last code of each packed scheme: symmetric, as a mean other than 0 would add the same vector to every
# row, layer after layer.
DESCRIBED = {"int8": int8.scheme(), "int4": int4.scheme(128), "nf4": nf4.scheme(), "ternary": ternary.scheme()}
DESCRIBED |= {"ternary-1.25": three_of_four.scheme()}
DESCRIBED |= {name: trellis.scheme(bits) for name, bits in TRELLISES.items()}
CODES = {"int8": (-127, 127), "int4": (-7, 7), "nf4": (0, 15), "ternary": (-1, 1)}
MARK = "specpress_random_weights"
"""Key of config.json that says a model is one of these."""

Weight = PackedWeight | Tensor
NO_SHARDS: Any = None
"""The files of a checkpoint that has none."""


def is_random(config: Any) -> bool:
    """Whether a loaded model's configuration says that its weights are random."""
    return bool(getattr(config, MARK, False))


def write_shape(
    shape: str, scheme: str, out: str | Path, head: str = "int8", seed: int = 0, layers: int | None = None
) -> Path:
    """Writes a model directory (config.json and sharded safetensors, no tokenizer) and returns it: whole or not at all.

    shape, scheme  names of SHAPES and SCHEMES. Embedding and norms are bfloat16 (f32: float32), and so is what no
                   format packs: routers, gates of one output, what latent attention expands its vectors by. Experts of
                   gpt-oss are mxfp4 whatever the scheme.
    head           "int8": a packed head of its own, also where the published model ties it to the embedding.
                   "keep": as published, plain. Beside nf4, ternary, ternary-1.25 or trellis layers no other
                   library knows an int8 head; `runtime.load` does.
    seed           the same arguments give the same bytes.
    layers         the model of its first layers alone; None: of all.

    Raises UserError for a name that is not offered, an `out` that exists, or a disk that refuses.
    """
    from safetensors import SafetensorError

    require_offered(shape, scheme, head)
    about = SHAPES[shape].first(layers)
    config = _config_of(about, scheme, head)
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists already; name a new directory for the model or remove this one")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out}: the folder that it is to lie in does not exist; make it first")
    try:
        with TemporaryDirectory(prefix=f".{out.name}-", dir=out.absolute().parent) as beside:
            folder = Path(beside) / "model"
            folder.mkdir()
            drawn = RandomCheckpoint(out, config, NO_SHARDS, about, scheme, head, seed=seed)
            write_weights(folder, drawn)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            folder.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written ({error}); make room there, or choose another folder") from error
    return out


def model_config(shape: str, scheme: str, head: str = "int8", layers: int | None = None) -> dict[str, Any]:
    """config.json of what `write_shape` writes. Raises UserError for a name that is not offered."""
    require_offered(shape, scheme, head)
    return _config_of(SHAPES[shape].first(layers), scheme, head)


def _config_of(about: Shape, scheme: str, head: str) -> dict[str, Any]:
    packed: dict[str, Scheme] = {}
    plain = [name for name in about.linear if scheme in ("f32", "bf16")]
    if not plain:
        packed = {name: described(scheme, inputs) for name, (_, inputs) in about.linear.items()}
    config = dict(about.config) | {"dtype": "float32" if scheme == "f32" else "bfloat16", MARK: True}
    if head == "int8":
        config["tie_word_embeddings"] = False
    if head == "keep" or scheme in ("nf4", "ternary", "ternary-1.25", *TRELLISES):
        # bitsandbytes, bitnet and our own formats cannot say that a layer is int8: the head's tensors do.
        plain.append("lm_head")
    else:
        packed["lm_head"] = int8.scheme()
    if packed:
        config["quantization_config"] = hf_config(packed, plain)
    return config


def described(scheme: str, inputs: int) -> Scheme:
    """A packed scheme for rows of so many inputs: of int4 the widest groups, of up to 128, that divide them."""
    if scheme == "int4":
        return int4.scheme(next((group for group in (128, 64, 32) if inputs % group == 0), 128))
    return DESCRIBED[scheme]


def random_weight(scheme: str, outputs: int, inputs: int, generator: torch.Generator) -> Weight:
    """A weight (outputs, inputs) of variance 1 / inputs, so that a layer's outputs vary as much as its inputs.

    Drawn on the generator's device: codes are uniform, scales within a quarter of one another. Float weights come as
    they are stored (f32, bf16). Raises ValueError for a scheme that is in neither SCHEMES nor DEVICE_SCHEMES, or groups
    that do not divide the inputs.
    """
    device = generator.device
    if scheme in ("f32", "bf16"):
        dtype = torch.float32 if scheme == "f32" else torch.bfloat16
        spread = (3.0 / inputs) ** 0.5
        return torch.empty(outputs, inputs, dtype=dtype, device=device).uniform_(-spread, spread, generator=generator)
    if scheme == "ternary-1.25":
        return three_of_four.random_weight((outputs, inputs), generator)
    if scheme in TRELLISES:
        return trellis.random_weight((outputs, inputs), TRELLISES[scheme], generator)
    if scheme not in DEVICE_SCHEMES:
        offered = dict.fromkeys((*SCHEMES, *DEVICE_SCHEMES))
        raise ValueError(f"scheme must be one of {', '.join(offered)}, found {scheme!r}")
    if scheme == "fp8":
        drawn = random_weight("bf16", outputs, inputs, generator)
        assert isinstance(drawn, Tensor)
        return fp8.pack(drawn)
    about = described(scheme, inputs)
    groups = inputs // group_width(inputs, about.group_size)
    first, last = CODES[scheme]
    codes = torch.randint(first, last + 1, (outputs, inputs), dtype=torch.int8, device=device, generator=generator)
    values = nf4.LEVELS if scheme == "nf4" else torch.arange(first, last + 1, dtype=torch.float32)
    scale = 1.0 / (values.square().mean().sqrt() * inputs**0.5)
    if scheme == "ternary":
        one = ternary.storable(scale, torch.bfloat16)
        return PackedWeight(about, codes, one.to(device).expand(outputs, 1).contiguous())
    varied = torch.empty(outputs, groups, device=device).uniform_(0.75, 1.25, generator=generator) * float(scale)
    return PackedWeight(about, codes, round_scale(varied, torch.bfloat16))


@dataclass(frozen=True)
class RandomCheckpoint(Checkpoint):
    """A checkpoint without files, whose tensors are drawn when they are asked for: the same ones for the same seed."""

    shape_of: Shape
    scheme: str
    head: str
    device: str = "cpu"
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of embedding, norms and biases."""
        return torch.float32 if self.scheme == "f32" else torch.bfloat16

    def names(self) -> list[str]:
        """Of all tensors, as an unpacked checkpoint has them: the decoder asks for biases and experts by them."""
        fused = self._experts_fused()
        return [name for name in self.shape_of.tensors if name not in fused] + [
            f"{name}_{part}" for name in fused for part in ("blocks", "scales")
        ]

    def tensor(self, name: str) -> Tensor:
        """What is no packed layer: embeddings, norms of ones, routers, biases, filters."""
        base, part = name.rpartition("_")[::2]
        if part in ("blocks", "scales") and base in self._experts_fused():
            return self._expert_codes(base, part)
        shape, a, draws = self.shape_of.tensors[name], self.shape_of.architecture, self._generator(name)
        if len(shape) == 2 and not name.endswith("_bias"):
            found = random_weight(self._plain, shape[0], shape[1], draws)
            assert isinstance(found, Tensor)
            return found
        if name.endswith("norm.weight"):
            shifted = name.removesuffix(".weight").endswith(_shifted(a.names))
            return torch.full(shape, 1.0 - a.norm_offset * shifted, dtype=self.dtype, device=self.device)
        # A filter keeps the size of what goes in; logarithms of decays and their biases lie where trained ones do.
        low, high = {"A_log": (0.0, 2.0), "dt_bias": (-4.0, 0.0)}.get(name.rsplit(".", 1)[1], (-0.1, 0.1))
        if len(shape) == 3:
            high = (3.0 / shape[-1]) ** 0.5
            low = -high
        return torch.empty(shape, device=self.device).uniform_(low, high, generator=draws).to(self.dtype)

    def weight(self, prefix: str, unpack: bool = True) -> Weight:
        """A layer's weight, of variance 1 / inputs, in the scheme."""
        outputs, inputs = self.shape_of.tensors[f"{prefix}.weight"]
        kind = self.scheme if prefix in self.shape_of.linear else self._plain
        if prefix == "lm_head" and self.head == "int8":
            kind = "int8"
        return random_weight(kind, outputs, inputs, self._generator(prefix))

    def _experts_fused(self) -> dict[str, tuple[int, ...]]:
        """The tensors of experts that are not one by one: (experts, inputs, outputs)."""
        fused = (".experts.gate_up_proj", ".experts.down_proj")
        return {name: shape for name, shape in self.shape_of.tensors.items() if name.endswith(fused)}

    def _expert_codes(self, name: str, part: str) -> Tensor:
        """mxfp4: codes of levels whose mean square is 8.6, and exponents that bring the variance near 1 / inputs."""
        experts, inputs, outputs = self._experts_fused()[name]
        size = (experts, outputs, inputs // 32)
        if part == "scales":
            return torch.full(size, 127 - round(log2(8.6 * inputs) / 2), dtype=torch.uint8)
        return torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=self._generator(name))

    @property
    def _plain(self) -> str:
        return "f32" if self.scheme == "f32" else "bf16"

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(crc32(f"{self.seed} {name}".encode()))


def require_offered(shape: str, scheme: str, head: str, schemes: Sequence[str] = SCHEMES) -> None:
    """Raises UserError for a name that is not offered."""
    for name, found, offered in (("shape", shape, tuple(SHAPES)), ("scheme", scheme, schemes), ("head", head, HEADS)):
        if found not in offered:
            raise UserError(f"{name} {found!r} is unknown; use one of {', '.join(offered)}")


def write_weights(folder: Path, model: RandomCheckpoint) -> None:
    """Writes one shard per block, and one before them for everything outside the blocks; and their index."""
    from safetensors.torch import save_file

    a, linear = model.shape_of.architecture, dict(model.shape_of.linear)
    packed_head = model.head == "int8"
    if packed_head:
        linear["lm_head"] = model.shape_of.tensors["lm_head.weight"][:2]  # type: ignore[assignment]
    block = a.names.block.format("")

    def place(name: str) -> int:
        return int(name.removeprefix(block).split(".", 1)[0]) if name.startswith(block) else -1

    names = [n for n in model.names() if packed_head or not a.tied or n != "lm_head.weight"]
    shards = [list(found) for _, found in groupby(sorted(names, key=place), key=place)]
    weight_map: dict[str, str] = {}
    total = 0
    for number, held in enumerate(shards, start=1):
        tensors: dict[str, Tensor] = {}
        for name in held:
            prefix, part = name.rpartition(".")[::2]
            if prefix not in linear:
                tensors[name] = model.tensor(name)
            elif part == "weight":
                tensors |= _stored(model, prefix)
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _shifted(names: Names) -> tuple[str, ...]:
    """The norms that a model's offset is for: of blocks, of queries and keys, and the last."""
    found = (names.norm, names.input_norm, names.attention_norm, names.mlp_norm, names.output_norm)
    return tuple(name for name in (*found, names.query_norm, names.key_norm) if name is not None)


def _stored(model: RandomCheckpoint, prefix: str) -> dict[str, Tensor]:
    """A layer's tensors as its format stores them."""
    weight, name = model.weight(prefix), f"{prefix}.bias"
    bias = model.tensor(name) if name in model.names() else None
    if isinstance(weight, Tensor):
        return {f"{prefix}.weight": weight} | ({} if bias is None else {name: bias})
    if weight.scheme.kind == "nf4":
        nested = double_quantize(weight.scale.flatten())
        weight = Nf4Weight(weight.scheme, weight.codes, nested.undo().view_as(weight.scale), nested=nested)
    return to_tensors(weight if bias is None else replace(weight, bias=bias.float()), prefix, model.dtype)
