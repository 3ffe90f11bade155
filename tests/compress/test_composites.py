"""Checkpoints with towers beside the language model: that is compressed, all else is carried byte for byte."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compress import compress
from compress.errors import USER_ERRORS
from runtime import Speculator, load
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.models.tiny import tiny_model
from runtime.speculative.drafters.lookup import LookupDrafter
from tests.compress.tiny_architectures import PAIR, gemma4

CLASSES = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
}
RECIPES = ("int8-dynamic", "nf4", "int4-gptq")
SLICE = {("mistral3", "int4-gptq")}
# Without experts, whose choice rounding decides in a random model.
_GEMMA4: dict[str, Any] = {
    **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "enable_moe_block": False,
}
TOKENS = torch.tensor([5, 9, 17, 300, 41, 7, 88, 1000])


def make(kind: str, out: Path) -> None:
    """A folder as it is downloaded, with what turns images into inputs."""
    model = gemma4(kind, **_GEMMA4) if kind == "gemma4" else tiny_model(kind, CLASSES[kind])
    model.to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PAIR / name, out)
    (out / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')


def run(source: Path, recipe: str, out: Path) -> Path:
    options: dict[str, Any] = {"speed": False, "eval_tokens": 64, "seq_len": 32, "samples": 4, "threads": 1}
    return compress(source, recipe, out, **options).path


def _of_a_tower(name: str) -> bool:
    return "vision" in name or "visual" in name


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        pytest.param(kind, recipe, marks=() if (kind, recipe) in SLICE else pytest.mark.slow)
        for kind in CLASSES
        for recipe in RECIPES
    ],
)
def test_the_language_model_is_compressed_and_its_towers_are_carried(kind: str, recipe: str, tmp_path: Path) -> None:
    if recipe == "nf4":
        pytest.importorskip("bitsandbytes")
    make(kind, tmp_path / "source")
    folder = run(tmp_path / "source", recipe, tmp_path / "run")
    before, after = open_checkpoint(tmp_path / "source").shards, open_checkpoint(folder / "model").shards
    report = json.loads((folder / "report.json").read_text())
    beside = [entry for entry in report["left_alone"] if entry["why"].startswith("beside the language model")]
    towers = [name for name in before if _of_a_tower(name)]
    assert len(towers) > 10 and beside
    packed = {f"{layer['name']}.weight" for layer in report["quality"]["layers"]}
    for name in (set(before) & set(after)) - packed:
        assert before.entry(name).dtype == after.entry(name).dtype
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
    assert set(towers) <= set(after)
    assert not any(_of_a_tower(layer["name"]) for layer in report["quality"]["layers"])
    assert any("q_proj" in layer["name"] for layer in report["quality"]["layers"])
    if kind == "llama4":
        assert any(".experts.3.down_proj" in layer["name"] for layer in report["quality"]["layers"])
    assert (folder / "model" / "preprocessor_config.json").read_text() == '{"image_mean": [0.5]}'
    check_loads(folder / "model", CLASSES[kind])


@torch.inference_mode()
def check_loads(folder: Path, name: str) -> None:
    """As the composite in transformers, and as text here, with the same logits and with drafts."""
    given: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(folder, **given)
    assert type(model).__name__ == name and not any(info.values()), info
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    expected = model.eval()(input_ids=TOKENS[None]).logits[0]
    ours = load(folder, threads=1)
    cache = ours.decoder.new_cache()
    found = ours.decoder.forward(TOKENS, Rows.chains([(cache.open(8), 0, 8)]), cache).logits
    # Our kernels round what packed layers read to int8, which transformers does not.
    assert (found - expected).norm() < 0.05 * expected.norm()
    plain, drafted = (
        Speculator(ours, drafter, draft_length=3).generate([TOKENS.tolist() * 2], max_new_tokens=8, stop=())[0].tokens
        for drafter in (None, LookupDrafter())
    )
    assert plain == drafted


@pytest.mark.parametrize("recipe", ["width-25", "depth-25", "mixed-4.5bit", "ternary"])
def test_what_is_only_done_to_a_language_model_alone_is_refused(recipe: str, tmp_path: Path) -> None:
    make("mistral3", tmp_path / "source")
    with pytest.raises(USER_ERRORS, match="done to a language model alone, and a Mistral3ForConditionalGeneration"):
        run(tmp_path / "source", recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
