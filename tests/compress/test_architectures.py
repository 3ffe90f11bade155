"""Families outside of our decoder's: a recipe ends in a report, and transformers loads the artifact."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import compress

PAIR = Path(__file__).parents[2] / "examples" / "pair" / "target"
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 4096}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 4096},
    "opt": SMALL | {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "phi": SMALL | {"intermediate_size": 128},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 4096},
    "starcoder2": SMALL | {"intermediate_size": 128, "num_key_value_heads": 2},
}


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in list(FAMILIES)[1:])]
)
def test_nf4_with_biases_and_layer_norms(family: str, tmp_path: Path) -> None:
    """transformers loads such a model's biases in another type than its norms, and a layer norm takes one of them."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family], **tokens)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    source = tmp_path / "source"
    model.save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PAIR / name, source)
    made = compress(source, "nf4", tmp_path / "run", speed=False, eval_tokens=256, seq_len=64, threads=1)
    quality = json.loads((made.path / "report.json").read_text())["quality"]
    found = quality["perplexity"]
    assert found["compressed"] == pytest.approx(found["original"], rel=0.05)
    assert quality["kl_divergence"]["mean"] > 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(made.path / "model")
    assert torch.isfinite(loaded(torch.tensor([[5, 9, 17]])).logits).all()
