"""Originals that cannot be compressed are refused before any work, and a sound one is opened."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import UserError
from compress.model.source import open_sources

Tiny = Callable[..., Path]
LAYER = "model.layers.1.mlp.up_proj.weight"


def with_type(source: Path, out: Path, name: str, dtype: torch.dtype) -> str:
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return str(out)


def test_a_matrix_of_integers_is_told_at_once(tiny: Tiny, tmp_path: Path) -> None:
    for dtype in (torch.float64, torch.float16):
        sound, _ = open_sources(with_type(tiny("llama"), tmp_path / str(dtype), LAYER, dtype), None)
        assert sound.shapes()[LAYER][1] == 64
    with pytest.raises(UserError, match=rf"tensor {LAYER} holds I32, expected F64, F32, F16, BF16: .*name the orig"):
        open_sources(with_type(tiny("llama"), tmp_path / "integers", LAYER, torch.int32), None)


@pytest.mark.parametrize(("method", "way"), [("mxfp4", "Mxfp4Config"), ("awq", "")])
def test_a_release_that_is_quantised_is_refused_with_a_way_to_a_plain_copy(
    method: str, way: str, tiny: Tiny, tmp_path: Path
) -> None:
    import transformers

    assert not way or hasattr(transformers, way)
    model = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(UserError, match=f"expected weights in full precision, found {method}: name the orig") as told:
        open_sources(str(model), None)
    assert (f"{way}(dequantize=True)" in str(told.value)) == bool(way)
