"""Models that the tests share, written once per session as ordinary directories: tiny random ones, and the pair's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

_SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 40},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "phi3": {},
    "gemma": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
ARCHITECTURES = (*_EXTRA, "gpt2")


def tiny_config(kind: str) -> Any:
    """A transformers configuration of two layers."""
    from transformers import AutoConfig

    if kind == "gpt2":
        return AutoConfig.for_model(
            "gpt2",
            vocab_size=320,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=256,
            bos_token_id=0,
            eos_token_id=0,
            # So that transformers has to run it: our decoders run the usual form.
            activation_function="quick_gelu",
        )
    return AutoConfig.for_model(kind, **_SHAPE, **_EXTRA[kind])


def byte_tokenizer() -> Any:
    """A byte-level tokenizer of 320 entries: 0 ends a text, 1..256 are the bytes, the rest are merges of spaces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    merges = [(space, c) for c in alphabet[:63]]
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<end>", eos_token="<end>", pad_token="<end>")


def write_tiny(kind: str, path: Path, seed: int = 0, **changes: Any) -> Path:
    """Saves a random model with weights large enough that its logits differ, and a tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = tiny_config(kind)
    for key, value in changes.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1 and "norm" in name.lower():
                weight.add_(torch.randn_like(weight) * 0.1)
            elif weight.dim() >= 2:
                weight.copy_(torch.randn_like(weight) * 0.08)
            else:
                weight.copy_(torch.randn_like(weight) * 0.02)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny("qwen3")` is the directory of a tiny random model; the same arguments give the same directory."""
    made: dict[str, Path] = {}

    def get(kind: str, seed: int = 0, **changes: Any) -> Path:
        key = f"{kind}-{seed}-{sorted(changes.items())}"
        if key not in made:
            made[key] = write_tiny(kind, tmp_path_factory.mktemp(kind) / kind, seed, **changes)
        return made[key]

    return get


@pytest.fixture(scope="session")
def pair_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`pair_target("nf4")` is the embedded pair's target by that recipe; also "original", and "ternary"."""
    from compress.model.source import default_pair
    from compress.pipeline import compress

    source: Path = default_pair()[0]
    made: dict[str, Path] = {"original": source}

    def get(name: str) -> Path:
        if name not in made:
            out = tmp_path_factory.mktemp("pair") / name
            if name == "ternary":
                made[name] = write_ternary(source, out)
            else:
                # Only the weights are wanted here: no report.
                made[name] = compress(source, name, out, report=lambda *_: {}).model
        return made[name]

    return get


def write_ternary(source: Path, out: Path) -> Path:
    """The model with its linear layers rounded to −1, 0, 1: no text of any use, and a target like any other."""
    from safetensors.torch import save_file

    from runtime import formats
    from runtime.checkpoints.open import open_checkpoint
    from runtime.formats import ternary

    checkpoint = open_checkpoint(source)
    tensors, schemes = {}, {}
    for name in checkpoint.names():
        prefix = name.removesuffix(".weight")
        if name.endswith("_proj.weight"):
            packed = ternary.pack(checkpoint.tensor(name))
            tensors |= ternary.to_tensors(packed, prefix)
            schemes[prefix] = packed.scheme
        else:
            tensors[name] = checkpoint.tensor(name).clone()
    assert len(schemes) == 7 * checkpoint.config["num_hidden_layers"]
    shutil.copytree(source, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = checkpoint.config | {"quantization_config": formats.hf_config(schemes, ["lm_head"])}
    (out / "config.json").write_text(json.dumps(config))
    return out


MEDUSA_TREE = ((0,), (1,), (0, 0), (2,), (1, 0), (0, 1), (0, 0, 0), (3,))


def write_medusa(
    model: Path, folder: Path, scale: float = 0.0, shared: bool = True, seed: int = 0, **about: Any
) -> Path:
    """Saves Medusa heads for a model: random matrices of that scale (0: every head repeats the target's own one).

    about  further fields of the description, over 3 heads of 1 layer and `MEDUSA_TREE`.
    """
    from safetensors.torch import save_file

    from runtime.checkpoints.drafter_files import weights_digest
    from runtime.checkpoints.medusa import DESCRIPTION, WEIGHTS, Description

    config = json.loads((model / "config.json").read_text())
    sizes = {"hidden_size": config["hidden_size"], "vocab_size": config["vocab_size"]}
    known = {"heads": 3, "layers": 1, **sizes, "choices": MEDUSA_TREE, "target": weights_digest(model)}
    description = Description(shared=shared, **known | about)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in description.shapes().items()}
    tensors = {name: (0.1 if "projection" in name else scale) * tensor for name, tensor in tensors.items()}
    unit = torch.eye(description.hidden_size)
    tensors |= {name: tensor + unit for name, tensor in tensors.items() if "mix" in name}
    folder.mkdir(parents=True)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / WEIGHTS)
    (folder / DESCRIPTION).write_text(description.to_json())
    return folder


def write_block(model: Path, folder: Path, scheme: str = "", seed: int = 0, **about: Any) -> Path:
    """Saves a block drafter of random matrices for a model; `about`: further fields of the description."""
    from safetensors.torch import save_file

    from runtime.checkpoints.block_draft import DESCRIPTION, WEIGHTS, Description
    from runtime.checkpoints.drafter_files import weights_digest

    config = json.loads((model / "config.json").read_text())
    known: dict[str, Any] = {"taps": (1, 2), "length": 6, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    known |= {
        "intermediate_size": 96,
        "window": 20,
        "rank": 8,
        "scheme": scheme,
        "head": scheme,
        "target": weights_digest(model),
    }
    sizes = {"hidden_size": config["hidden_size"], "vocab_size": config["vocab_size"]}
    description = Description(**known | sizes | about)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 1 + 0.1 * torch.randn(shape, generator=generator)
        if "norm" in name
        else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in description.shapes().items()
        if name != "frequent"
    }
    if description.frequent:
        ids = torch.randperm(description.vocab_size, generator=generator)[: description.frequent]
        tensors["frequent"] = ids.sort().values.int()
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / DESCRIPTION).write_text(description.to_json())
    return folder
