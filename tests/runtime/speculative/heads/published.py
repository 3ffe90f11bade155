"""Random heads in the layouts that others publish, written without their libraries."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runtime.checkpoints.heads.layouts import layout_of
from runtime.checkpoints.heads.open import stored
from runtime.checkpoints.heads.record import Shapes

VOCAB, HIDDEN = 320, 64
LAYERS: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}


def speculators(kind: str, layers: int = 1, **about: Any) -> dict[str, Any]:
    """A config.json as speculators writes it."""
    return {
        "speculators_model_type": kind,
        "transformer_layer_config": {**LAYERS, "num_hidden_layers": layers},
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]},
        **about,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "eagle3": speculators("eagle3", draft_vocab_size=64, eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
    "peagle": speculators(
        "peagle", 2, draft_vocab_size=VOCAB, eagle_aux_hidden_state_layer_ids=[1, 2], mask_token_id=7
    ),
    "dflash": speculators("dflash", 2, draft_vocab_size=64, aux_hidden_state_layer_ids=[2, 1], mask_token_id=7),
    "dspark": speculators(
        "dspark", draft_vocab_size=VOCAB, aux_hidden_state_layer_ids=[1], mask_token_id=7, block_size=5, markov_rank=12
    ),
    "mtp": speculators("mtp"),
    "SpecForge": {
        **LAYERS,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 64,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    },
    "z-lab": {
        **LAYERS,
        "architectures": ["DFlashDraftModel"],
        "block_size": 6,
        "dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 1]},
    },
    "SpecForge-dspark": {
        **LAYERS,
        "architectures": ["DSparkDraftModel"],
        "block_size": 4,
        "dflash_config": {
            "mask_token_id": 9,
            "target_layer_ids": [1],
            "markov_rank": 8,
            "markov_head_type": "rnn",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    },
    "DeepSpec": {
        **LAYERS,
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 4,
        "mask_token_id": 9,
        "target_layer_ids": [-1, 1],
        "markov_rank": 0,
        "enable_confidence_head": False,
    },
    "DeepSpec-eagle3": {**LAYERS, "architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1]},
}


def write_head(folder: Path, values: dict[str, Any], seed: int = 0, own_tables: bool = True) -> Path:
    """A head's folder: its config.json, and random tensors under the names that its writer gives them.

    own_tables  whether it brings embeddings and an output layer where it may do without.
    """
    layout = layout_of(values)
    assert layout is not None
    about = layout.describe(values, "config.json")
    shapes = about.shapes() | (about.optional() if own_tables and about.kind == "eagle3" else {})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(
        {stored(name, layout): tensor for name, tensor in random_tensors(shapes, seed).items()},
        folder / "model.safetensors",
    )
    return folder


def random_tensors(shapes: Shapes, seed: int) -> dict[str, torch.Tensor]:
    """Tensors by name: norms around one, every fifth token in a draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        if name == "d2t":
            found[name] = (torch.arange(shape[0]) * (VOCAB // shape[0])) - torch.arange(shape[0])
        elif "norm" in name:
            found[name] = 1 + 0.2 * torch.randn(shape, generator=generator)
        else:
            found[name] = torch.randn(shape, generator=generator) * (1.0 if "embed" in name else shape[-1] ** -0.5)
    return found
