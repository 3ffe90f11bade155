"""A model that transformers saved."""

from pathlib import Path

import pytest
import torch

from tests.runtime.checkpoints.folders import SIZES


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with attention biases, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True))
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor, std=0.05)
    path = tmp_path_factory.mktemp("plain")
    model.save_pretrained(path)
    return path
