"""Real architectures with seeded random weights: models to time, not to read. Their text means nothing.

Codes and scales are drawn directly in each format, so that a billion weights take seconds, one block at a time.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from runtime.checkpoints.architecture import Architecture, describe
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.safetensors import INDEX
from runtime.errors import UserError
from runtime.formats import fp8, hf_config, int4, int8, nf4, ternary, to_tensors, trellis
from runtime.formats.nf4 import Nf4Weight, double_quantize
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import group_width, round_scale

_BOTH = ("f32", "bf16", "int8", "int4", "nf4", "ternary")
TRELLISES = {f"trellis-{bits}": bits for bits in (2, 3, 4)}
# fp8 is for GPUs, a trellis for CPUs.
SCHEMES, DEVICE_SCHEMES = (*_BOTH, *TRELLISES), (*_BOTH, "fp8")
HEADS = ("int8", "keep")
# The first and last code of each packed scheme: symmetric, as a mean other than 0 would add the same vector to every
# row, layer after layer.
DESCRIBED = {"int8": int8.scheme(), "int4": int4.scheme(128), "nf4": nf4.scheme(), "ternary": ternary.scheme()}
DESCRIBED |= {name: trellis.scheme(bits) for name, bits in TRELLISES.items()}
CODES = {"int8": (-127, 127), "int4": (-7, 7), "nf4": (0, 15), "ternary": (-1, 1)}
MARK = "specpress_random_weights"
"""Key of config.json that says a model is one of these."""

Weight = PackedWeight | Tensor
NO_SHARDS: Any = None
"""The files of a checkpoint that has none."""


@dataclass(frozen=True)
class Shape:
    """A published architecture: `config` is what its config.json says, with no dtype and no quantisation."""

    name: str
    config: Mapping[str, Any]

    @property
    def architecture(self) -> Architecture:
        """The sizes as the decoder reads them."""
        found = describe(dict(self.config))
        assert found is not None, f"{self.name} is of no family that the decoder runs"
        return found

    @property
    def biased(self) -> bool:
        """Whether queries, keys and values have biases."""
        return bool(self.config["model_type"] == "qwen2")


_COMMON: dict[str, Any] = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
_LLAMA: dict[str, Any] = _COMMON | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN2: dict[str, Any] = _COMMON | {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "use_sliding_window": False,
}
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _config(
    base: dict[str, Any],
    sizes: tuple[int, int, int, int, int, int, int],
    ends: tuple[int, int],
    tied: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """sizes: vocabulary, hidden, MLP, layers, heads, heads of keys and values, positions. ends: ids of bos and eos."""
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    )
    told = {"tie_word_embeddings": tied, "bos_token_id": ends[0], "eos_token_id": ends[1]}
    return base | dict(zip(names, sizes, strict=True)) | told | more


_LLAMA31: dict[str, Any] = _LLAMA | {"head_dim": 128, "rope_parameters": _LLAMA3_ROPE | {"factor": 8.0}}
_LLAMA3_ENDS = (128_000, 128_001)
_CONFIGS: dict[str, dict[str, Any]] = {
    "tinyllama-1.1b": _config(_LLAMA, (32_000, 2048, 5632, 22, 32, 4, 2048), (1, 2)),
    # 7 to 8 % of the bytes, which with what a forward costs whatever its size makes a tenth of the time.
    "tinyllama-tenth": _config(_LLAMA, (32_000, 768, 2048, 6, 12, 4, 2048), (1, 2)),
    "llama-3.2-1b": _config(
        _LLAMA, (128_256, 2048, 8192, 16, 32, 8, 131_072), _LLAMA3_ENDS, tied=True, rope_parameters=_LLAMA3_ROPE
    ),
    "llama-2-7b": _config(_LLAMA, (32_000, 4096, 11_008, 32, 32, 32, 4096), (1, 2), head_dim=128),
    "llama-3.1-8b": _config(_LLAMA31, (128_256, 4096, 14_336, 32, 32, 8, 131_072), _LLAMA3_ENDS),
    "llama-3.1-8b-tenth": _config(_LLAMA31, (128_256, 2048, 8192, 4, 32, 8, 131_072), _LLAMA3_ENDS, head_dim=64),
    "llama-3.1-70b": _config(_LLAMA31, (128_256, 8192, 28_672, 80, 64, 8, 131_072), _LLAMA3_ENDS),
    "qwen2.5-0.5b": _config(_QWEN2, (151_936, 896, 4864, 24, 14, 2, 32_768), (151_643, 151_643), tied=True),
    "pair": _config(_LLAMA, (4096, 512, 1536, 4, 8, 2, 1024), (0, 0), tied=True, pad_token_id=0),
}
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {name: Shape(name, MappingProxyType(config)) for name, config in _CONFIGS.items()}
)
"""The shapes by name: published models, drafts of a tenth of TinyLlama's and the 8B's cost, examples/pair's target."""


def is_random(config: Any) -> bool:
    """Whether a loaded model's configuration says that its weights are random."""
    return bool(getattr(config, MARK, False))


def write_shape(shape: str, scheme: str, out: str | Path, head: str = "int8", seed: int = 0) -> Path:
    """Writes a model directory (config.json and sharded safetensors, no tokenizer) and returns it: whole or not at all.

    shape, scheme  names of SHAPES and SCHEMES. Embedding and norms are bfloat16 (f32: float32).
    head           "int8": a packed head of its own, also where the published model ties it to the embedding.
                   "keep": as published, plain. Beside nf4, ternary or trellis layers no other library knows an int8
                   head; `runtime.load` does.
    seed           the same arguments give the same bytes.

    Raises UserError for a name that is not offered, an `out` that exists, or a disk that refuses.
    """
    from safetensors import SafetensorError

    config = model_config(shape, scheme, head)
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists already; name a new directory for the model or remove this one")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out}: the folder that it is to lie in does not exist; make it first")
    try:
        with TemporaryDirectory(prefix=f".{out.name}-", dir=out.absolute().parent) as beside:
            folder = Path(beside) / "model"
            folder.mkdir()
            drawn = RandomCheckpoint(out, config, NO_SHARDS, SHAPES[shape], scheme, head, seed=seed)
            _write_weights(folder, drawn)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            folder.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written ({error}); make room there, or choose another folder") from error
    return out


def model_config(shape: str, scheme: str, head: str = "int8") -> dict[str, Any]:
    """config.json of what `write_shape` writes. Raises UserError for a name that is not offered."""
    require_offered(shape, scheme, head)
    chosen = SHAPES[shape]
    layers = [f"model.layers.{i}.{name}" for i in range(chosen.architecture.layers) for name in block_layers(chosen)]
    packed = {} if scheme in ("f32", "bf16") else dict.fromkeys(layers, DESCRIBED[scheme])
    plain = [name for name in layers if name not in packed]
    config = dict(chosen.config) | {"dtype": "float32" if scheme == "f32" else "bfloat16", MARK: True}
    if head == "int8":
        config["tie_word_embeddings"] = False
    if head == "keep" or scheme in ("nf4", "ternary", *TRELLISES):
        # bitsandbytes, bitnet and a trellis cannot say that a layer is int8: the head's tensors do.
        plain.append("lm_head")
    else:
        packed["lm_head"] = int8.scheme()
    if packed:
        config["quantization_config"] = hf_config(packed, plain)
    return config


def block_layers(shape: Shape) -> dict[str, tuple[int, int]]:
    """Linear layers of a block: name within it → (outputs, inputs)."""
    a = shape.architecture
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    return {
        "self_attn.q_proj": (queries, a.hidden),
        "self_attn.k_proj": (keys, a.hidden),
        "self_attn.v_proj": (keys, a.hidden),
        "self_attn.o_proj": (a.hidden, queries),
        "mlp.gate_proj": (a.intermediate, a.hidden),
        "mlp.up_proj": (a.intermediate, a.hidden),
        "mlp.down_proj": (a.hidden, a.intermediate),
    }


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
    if scheme in TRELLISES:
        return trellis.random_weight((outputs, inputs), TRELLISES[scheme], generator)
    if scheme not in DEVICE_SCHEMES:
        offered = dict.fromkeys((*SCHEMES, *DEVICE_SCHEMES))
        raise ValueError(f"scheme must be one of {', '.join(offered)}, found {scheme!r}")
    if scheme == "fp8":
        drawn = random_weight("bf16", outputs, inputs, generator)
        assert isinstance(drawn, Tensor)
        return fp8.pack(drawn)
    about = DESCRIBED[scheme]
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
        """Of what there is besides the layers' weights: the decoder asks for biases by them."""
        layers = range(self.shape_of.architecture.layers if self.shape_of.biased else 0)
        return ["lm_head.weight", *(f"model.layers.{i}.self_attn.{part}_proj.bias" for i in layers for part in "qkv")]

    def tensor(self, name: str) -> Tensor:
        """The embedding, a norm or a bias."""
        a = self.shape_of.architecture
        if name.endswith("norm.weight"):
            return torch.ones(a.hidden, dtype=self.dtype, device=self.device)
        if name == "model.embed_tokens.weight":
            found = random_weight(self._plain, a.vocab, a.hidden, self._generator(name))
            assert isinstance(found, Tensor)
            return found
        outputs, _ = block_layers(self.shape_of)[name.removesuffix(".bias").split(".", 3)[-1]]
        bias = torch.empty(outputs, device=self.device).uniform_(-0.1, 0.1, generator=self._generator(name))
        return bias.to(self.dtype)

    def weight(self, prefix: str, unpack: bool = True) -> Weight:
        """A layer's weight, of variance 1 / inputs, in the scheme."""
        a = self.shape_of.architecture
        if prefix == "lm_head":
            kind = "int8" if self.head == "int8" else self._plain
            return random_weight(kind, a.vocab, a.hidden, self._generator(prefix))
        sizes = block_layers(self.shape_of)[prefix.split(".", 3)[-1]]
        return random_weight(self.scheme, *sizes, self._generator(prefix))

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


def _write_weights(folder: Path, model: RandomCheckpoint) -> None:
    """One shard per block, and one before them for everything outside the blocks; and their index."""
    from safetensors.torch import save_file

    a, blocks = model.shape_of.architecture, block_layers(model.shape_of)
    head = ["lm_head"] if model.head == "int8" or not a.tied else []
    shards = [(head, ["model.embed_tokens", "model.norm"])]
    for at in (f"model.layers.{number}" for number in range(a.layers)):
        norms = [f"{at}.{norm}" for norm in ("input_layernorm", "post_attention_layernorm")]
        shards.append(([f"{at}.{name}" for name in blocks], norms))
    weight_map: dict[str, str] = {}
    total = 0
    for number, (layers, plain) in enumerate(shards, start=1):
        tensors = {name: model.tensor(name) for name in (f"{prefix}.weight" for prefix in plain)}
        for prefix in layers:
            tensors |= _stored(model, prefix)
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


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
