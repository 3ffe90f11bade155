"""The embedded pair's artifacts: what is on disk, what the formats' own libraries read, what our kernels make of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from calib.sources import is_held_out, standard_library
from compress import Artifact
from compress.model.source import default_pair
from compress.pipeline import compress
from compress.records import RunFacts
from compress.report.size import bits_per_weight, weight_bytes
from runtime import Model, load
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight

BITS = {"nf4": 4.2, "int8-dynamic": 8.1, "int4-rtn": 4.2}


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    text = next(text for path, text in standard_library() if is_held_out(path) and len(text) > 8000)
    ids = load(default_pair()[0]).tokenizer(text[1000:4000])["input_ids"]
    return torch.tensor(ids[:256])


@pytest.fixture(scope="module", params=BITS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Artifact, RunFacts]:
    seen: list[RunFacts] = []

    def keep(facts: RunFacts, *_: Any) -> dict[str, Any]:
        seen.append(facts)
        return {}

    out = tmp_path_factory.mktemp("artifacts") / request.param
    return request.param, compress(None, request.param, out, report=keep), seen[0]


def ours(model: Model, tokens: Tensor) -> Tensor:
    cache = model.decoder.new_cache()
    return model.decoder.forward(tokens, Rows.chains([(cache.open(len(tokens)), 0, len(tokens))]), cache).logits


def theirs(model: Any, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(tokens.view(1, -1)).logits[0].float()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def original(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def test_the_float_path_is_transformers(tokens: Tensor) -> None:
    source = default_pair()[0]
    assert relative(ours(load(source), tokens), theirs(original(source), tokens)) < 1e-3


def test_bits_and_bytes(made: tuple[str, Artifact, RunFacts]) -> None:
    name, artifact, facts = made
    assert 4 < bits_per_weight(facts.layers) <= BITS[name]
    assert len(facts.layers) == 7 * json.loads((facts.original / "config.json").read_text())["num_hidden_layers"]
    files = list(artifact.model.glob("*.safetensors"))
    assert weight_bytes(artifact.model) == sum(file.stat().st_size for file in files)
    assert weight_bytes(artifact.model) < weight_bytes(facts.original) * (0.62 if name == "int8-dynamic" else 0.42)
    artifact.verify()


def test_kernels_against_the_dequantised_weights(made: tuple[str, Artifact, RunFacts], tokens: Tensor) -> None:
    _, artifact, facts = made
    model = original(facts.original)
    checkpoint = open_checkpoint(artifact.model)
    with torch.no_grad():
        for layer in facts.layers:
            packed = checkpoint.weight(layer.name)
            assert isinstance(packed, PackedWeight)
            model.get_submodule(layer.name).weight.copy_(dequantize(packed))
    assert 1e-5 < relative(ours(load(artifact.model), tokens), theirs(model, tokens)) < 0.02


def test_from_pretrained(made: tuple[str, Artifact, RunFacts], tokens: Tensor) -> None:
    name, artifact, _ = made
    pytest.importorskip("bitsandbytes" if name == "nf4" else "compressed_tensors")
    assert relative(theirs(original(artifact.model), tokens), ours(load(artifact.model), tokens)) < 0.02


def test_bitsandbytes_gives_our_codes(made: tuple[str, Artifact, RunFacts]) -> None:
    name, artifact, facts = made
    if name != "nf4":
        pytest.skip("nf4 is bitsandbytes' format")
    bnb = pytest.importorskip("bitsandbytes.functional")
    source, stored = open_checkpoint(facts.original), open_checkpoint(artifact.model)
    for layer in facts.layers:
        weight = source.tensor(f"{layer.name}.weight")
        codes, _ = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        assert torch.equal(codes, stored.tensor(f"{layer.name}.weight"))
