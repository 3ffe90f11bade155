"""Language models inside of checkpoints with towers for images, on our own decoders: text as transformers has it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from runtime import load
from runtime.checkpoints.architecture import COMPOSITES
from runtime.errors import UserError
from runtime.model.base import BaseDecoder
from runtime.model.native import NativeDecoder
from runtime.models.tiny import tiny_model
from tests.runtime.model.test_families import relative, run, text

# How releases on the hub name the language model and its head, where transformers writes another name; None: the same.
OLDER: dict[str, tuple[str, str] | None] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), ("model.", "lm_head")),
    **dict.fromkeys(("idefics3", "smolvlm")),
}


def make(kind: str, out: Path) -> torch.Tensor:
    """Writes a composite, its norms random; the logits of 40 tokens by transformers."""
    torch.manual_seed(3)
    model = tiny_model(kind, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind]).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.1))
    model.set_attn_implementation("eager")
    model.save_pretrained(out)
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=tokens(model.config)[None]).logits[0]
    return found


def tokens(config: object) -> torch.Tensor:
    size = min(config.get_text_config().vocab_size, 256)  # type: ignore[attr-defined]
    return text(40) % (size - 100) + 1


@pytest.mark.parametrize("kind", COMPOSITES)
def test_the_language_model_runs_alone(kind: str, tmp_path: Path) -> None:
    want = make(kind, tmp_path / "whole")
    # As transformers writes it and as it is on the hub, in the older names.
    held, renamed = load_file(tmp_path / "whole" / "model.safetensors"), {}
    older = OLDER.get(kind, ("language_model.model.", "language_model.lm_head"))
    for name, tensor in held.items():
        if older is not None:
            name = name.replace("model.language_model.", older[0])
            name = name.replace("lm_head", older[1]) if name.startswith("lm_head") else name
        renamed[name] = tensor
    assert set(renamed) != set(held) or older is None or any(name.startswith(older[0]) for name in held)
    (tmp_path / "older").mkdir()
    save_file(renamed, tmp_path / "older" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "older" / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    for folder in ("whole", "older"):
        decoder = load(tmp_path / folder, threads=1).decoder
        assert isinstance(decoder, BaseDecoder) and (decoder.exact or not isinstance(decoder, NativeDecoder))
        found = run(decoder, tokens(load(tmp_path / folder, threads=1).config), 40)
        assert relative(found, want) < 1e-4, folder


def test_a_composite_of_other_names_is_refused(tmp_path: Path) -> None:
    make("mistral3", tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    mixed = {name.replace("language_model", "text_model"): tensor for name, tensor in held.items()}
    save_file(mixed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError):
        load(tmp_path)
