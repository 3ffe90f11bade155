"""What the pipeline refuses, in a sentence and with nothing left behind; and its call from Python."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import UserError
from compress.recipe import Recipe
from tests.compress.pipeline.small_runs import StopAt, Tiny, damaged, refusal


def test_bad_weights_are_named(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors[name][3, 5] = value

        return change

    for value in (float("nan"), float("inf")):
        model = damaged(tiny("llama"), tmp_path, spoil(value))
        assert f"tensor {name}" in refusal(tmp_path, lambda model=model: go(model))  # type: ignore[misc]
        shutil.rmtree(model)
    model = damaged(tiny("llama"), tmp_path, lambda tensors: tensors.__delitem__(name))
    assert f"tensor {name} is missing" in refusal(tmp_path, lambda: go(model))
    shutil.rmtree(model)
    model = damaged(tiny("llama"), tmp_path, lambda tensors: tensors.update({name: tensors[name][:5].clone()}))
    message = refusal(tmp_path, lambda: go(model))
    assert f"tensor {name}: expected shape [192, 64] as config.json says, found [5, 64]" in message
    shutil.rmtree(model)
    model = damaged(tiny("llama"), tmp_path, lambda tensors: None)
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "truncated" in refusal(tmp_path, lambda: go(model))


def test_models_that_cannot_be_taken(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny("llama"), model)
    config = json.loads((model / "config.json").read_text())
    for key, value in (("model_type", "nosuchmodel"), ("model_type", "vit"), ("hidden_size", "wide")):
        (model / "config.json").write_text(json.dumps(config | {key: value}))
        assert "model/config.json" in refusal(tmp_path, lambda: go(model))
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pickle" in refusal(tmp_path, lambda: go(model))
    index = {"weight_map": {"model.embed_tokens.weight": "../../evil.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "leaves the directory" in refusal(tmp_path, lambda: go(model))
    done, _ = go(tiny("llama"), out=tmp_path / "done")
    assert "full precision" in refusal(tmp_path, lambda: go(done.model))
    assert "no such directory" in refusal(tmp_path, lambda: go(tmp_path / "nowhere"))


def test_the_vocabularies_must_agree(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(tiny("mistral"), draft)
    content = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = (next(token for token, number in vocabulary.items() if number == n) for n in (40, 41))
    vocabulary[first], vocabulary[second] = 41, 40
    (draft / "tokenizer.json").write_text(json.dumps(content))
    message = refusal(tmp_path, lambda: go(tiny("llama"), draft=str(draft)))
    assert f"token 40 is {first!r} in the target and {second!r} in the draft" in message


def test_text_that_is_too_short_stops_before_the_work(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    never = StopAt("quantize", 0, AssertionError("the work began"))
    message = refusal(tmp_path, lambda: go(tiny("llama"), calib=str(tmp_path / "short.txt"), progress=never))
    assert "short.txt is too short" in message


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"baselines": "most"}, "--baselines: expected none, eager, all, found 'most'"),
        ({"samples": 0}, "--samples: expected a whole number from 1 to 100000, found 0"),
        ({"seq_len": 4}, "--seq-len"),
        ({"eval_tokens": -1}, "--eval-tokens: expected a whole number from 0"),
        ({"memory_budget": 0}, "--memory-budget"),
        ({"draft_length": 65}, "--draft-length: expected a whole number from 1 to 64, found 65"),
        ({"threads": 0}, "--threads"),
        ({"seed": -1}, "--seed"),
        ({"new_tokens": 0}, "--new-tokens"),
        pytest.param(
            {"device": "cuda"},
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA"),
        ),
        ({"device": "tpu"}, "--device: expected cpu, cuda, cuda:N or auto, found 'tpu'"),
    ],
)
def test_numbers_out_of_range(tiny: Tiny, go: Any, tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(tmp_path, lambda: go(tiny("llama"), **options))


def test_the_callers_threads_are_as_they_were(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    go(tiny("llama"), threads=before + 1)
    assert torch.get_num_threads() == before
    with pytest.raises(UserError, match="--threads"):
        go(tiny("llama"), out=tmp_path / "none", threads=0)
    assert torch.get_num_threads() == before


def test_the_python_api(tiny: Tiny, text: Path, tmp_path: Path) -> None:
    from compress import compress

    artifact = compress(
        tiny("llama"), Recipe.load("nf4"), tmp_path / "api", calib=str(text), seq_len=32, eval_tokens=64, samples=2,
        new_tokens=4, speed=False,
    )  # fmt: skip
    assert artifact.model == tmp_path / "api" / "model" and artifact.draft is None
    assert artifact.report["recipe"] == "nf4"
    assert artifact.report["speed"]["speculative"] is None
    artifact.verify()
    with pytest.raises(UserError, match="option 'sample' is unknown"):
        compress(tiny("llama"), "nf4", tmp_path / "x", sample=3)
