"""LongRoPE: two sets of factors, of which all texts of a decoder take the same; logits are transformers'."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from compress.export import silent
from compress.export.gguf.file import write as write_gguf
from runtime import load
from runtime.contract import Rows
from runtime.errors import UserError
from runtime.generate import app
from runtime.model.base import BaseDecoder
from runtime.model.rotary import for_context
from tests.conftest import byte_tokenizer

FIRST, ALL = 64, 512  # positions of the first training, and of all
SHORT, LONG = [1.0 + 0.01 * i for i in range(8)], [2.0 + 0.3 * i for i in range(8)]
ROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": FIRST},
    **{"short_factor": SHORT, "long_factor": LONG, "partial_rotary_factor": 1.0},
}


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("phi") / "model", FIRST)


def write(path: Path, first: int) -> Path:
    """Phi-4-mini's kind of model, whose short texts have `first` tokens at most."""
    from transformers import Phi3Config, Phi3ForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 80, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 5, "num_key_value_heads": 1, "max_position_embeddings": ALL}
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(3)
    rope = {"rope_parameters": ROPE | {"original_max_position_embeddings": first}}
    made = Phi3ForCausalLM(Phi3Config(**sizes, **tokens, **rope, original_max_position_embeddings=first))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    content = json.loads((path / "tokenizer.json").read_text())
    content["pre_tokenizer"]["use_regex"] = True  # so that GGUF has a name for it
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


def text(count: int) -> Tensor:
    return torch.randint(1, 320, (count,), generator=torch.Generator().manual_seed(1))


def theirs(path: Path, count: int) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        found: Tensor = model(text(count)[None]).logits[0]
    return found


def ours(path: Path, count: int, kernels: str, context: int | None) -> Tensor:
    decoder = load(path, threads=1, kernels=kernels, context=context).decoder
    assert isinstance(decoder, BaseDecoder)
    cache, found = decoder.new_cache(), []
    request = cache.open(count)
    for start in range(0, count, 30):
        piece = text(count)[start : start + 30]
        found.append(decoder.forward(piece, Rows.chains([(request, start, len(piece))]), cache).logits)
    return torch.cat(found)


def change(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_texts_of_either_length_are_transformers(phi: Path, kernels: str) -> None:
    short, long = theirs(phi, FIRST), theirs(phi, FIRST + 50)
    assert change(ours(phi, FIRST, kernels, None), short) < 1e-4
    assert change(ours(phi, FIRST, kernels, FIRST), short) < 1e-4
    assert change(ours(phi, FIRST + 50, kernels, FIRST + 50), long) < 1e-4
    # Where longer texts may come, short ones are rotated like them.
    assert change(ours(phi, FIRST, kernels, ALL), short) > 0.01 < change(long[:FIRST], short)


def test_there_are_positions_for_what_is_rotated_so(phi: Path) -> None:
    assert load(phi, threads=1).decoder.max_positions == FIRST
    assert load(phi, threads=1, context=FIRST + 1).decoder.max_positions == ALL
    result = CliRunner().invoke(app, ["--target", str(phi), "--prompt", "x" * 200, "--max-new-tokens", "4"])
    assert result.exit_code == 2 and "64 positions" in result.output and "--context" in result.output
    longer = ["--target", str(phi), "--prompt", "x" * 200, "--max-new-tokens", "4", "--context", "300"]
    assert CliRunner().invoke(app, longer).exit_code == 0


def test_a_gguf_file_has_both_sets(phi: Path, tmp_path: Path) -> None:
    """llama.cpp reads it so: tests/test_gguf_peer.py."""
    write_gguf(phi, tmp_path, silent, floats="f32")
    for count, context in ((FIRST, None), (FIRST + 50, ALL)):
        found = ours(tmp_path / "model.gguf", count, "auto", context)
        assert torch.equal(found, ours(phi, count, "auto", context))
    assert load(tmp_path / "model.gguf", threads=1).decoder.max_positions == FIRST


@pytest.mark.parametrize("length", [None, "x", 0])
def test_factors_without_a_length_are_refused(length: Any) -> None:
    config = SimpleNamespace(rope_parameters=ROPE | {"original_max_position_embeddings": length})
    with pytest.raises(UserError, match="original_max_position_embeddings"):
        for_context(config, None)
