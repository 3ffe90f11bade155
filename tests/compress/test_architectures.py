"""Families outside of our decoder's: a recipe ends in a report or a sentence, and transformers loads the artifact."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import compress
from compress.errors import USER_ERRORS
from runtime import load
from runtime.contract import Rows
from tests.compress.tiny_architectures import make

transformers = pytest.importorskip("transformers")

NINE = ("gpt2", "opt", "phi", "bloom", "starcoder2", "gpt_neox", "falcon", "granitemoe", "phimoe")
RECIPES = ("nf4", "int8-dynamic", "int4-rtn", "int4-gptq")
PLAIN_WEIGHT = "transformers' initialisation of this model asks for its plain weight"
LIMITS = {
    **{("gpt2", recipe): "a Conv1D, which compressed-tensors cannot hold" for recipe in RECIPES[1:]},
    **{("falcon", recipe): PLAIN_WEIGHT for recipe in RECIPES[2:]},
    ("falcon", "nf4"): "a FalconLinear, which bitsandbytes does not replace",
}
SLICE = {("gpt2", "nf4"), ("phimoe", "int4-gptq"), ("falcon", "int4-rtn")}
TOKENS = torch.tensor([5, 9, 17, 300, 41, 7, 88, 1000])


def run(source: Path, recipe: str, out: Path) -> Path:
    options: dict[str, Any] = {"speed": False, "eval_tokens": 64, "seq_len": 32, "samples": 4, "threads": 1}
    return compress(source, recipe, out, **options).path


@torch.inference_mode()
def check(folder: Path) -> None:
    """The artifact is near the original; transformers finds all its tensors, and gives the logits that we give."""
    quality = json.loads((folder / "report.json").read_text())["quality"]
    assert quality["perplexity"]["compressed"] == pytest.approx(quality["perplexity"]["original"], rel=0.1)
    given: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", **given)
    assert not any(info.values()), info
    method = json.loads((folder / "model" / "config.json").read_text())["quantization_config"]["quant_method"]
    for parameter in model.parameters():
        # bitsandbytes alone leaves norms in the file's type; scales of int8 are to stay as they are.
        if method == "bitsandbytes" and parameter.is_floating_point():
            parameter.data = parameter.data.float()
    expected = model.eval()(input_ids=TOKENS[None]).logits[0]
    decoder = load(folder / "model", threads=1).decoder
    cache = decoder.new_cache()
    rows = Rows.chains([(cache.open(len(TOKENS)), 0, len(TOKENS))])
    found = decoder.forward(TOKENS, rows, cache).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        pytest.param(family, recipe, marks=() if (family, recipe) in SLICE else pytest.mark.slow)
        for family in NINE
        for recipe in RECIPES
    ],
)
def test_report_or_limit(family: str, recipe: str, tmp_path: Path) -> None:
    if recipe == "nf4":
        pytest.importorskip("bitsandbytes")
    assert make(family, tmp_path / "source")
    if (family, recipe) in LIMITS:
        with pytest.raises(USER_ERRORS, match=LIMITS[family, recipe]):
            run(tmp_path / "source", recipe, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    else:
        check(run(tmp_path / "source", recipe, tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int4-rtn", "int4-gptq"])
@pytest.mark.parametrize("family", sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_architecture_that_transformers_builds(family: str, recipe: str, tmp_path: Path) -> None:
    """Whatever is refused is refused in a sentence, and before anything is written."""
    if not make(family, tmp_path / "source"):
        pytest.skip("not built in a small size")
    try:
        folder = run(tmp_path / "source", recipe, tmp_path / "run")
    except USER_ERRORS as error:
        assert len(str(error)) < 600 and "\n" not in str(error)
        return
    check(folder)
