"""Tensors of a checkpoint that no layer reads are told, and those of a whole one are not."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime import load
from runtime.model.base import BaseDecoder
from tests.runtime.model.families import write

Q_NORM = "model.layers.{}.self_attn.q_norm.weight"


def with_tensors(path: Path, *names: str) -> Path:
    """The model with further tensors of 8 numbers."""
    held = load_file(path / "model.safetensors")
    assert not held.keys() & set(names)
    save_file(held | {name: torch.randn(8) for name in names}, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_what_no_layer_reads_is_told(kernels: str, tmp_path: Path) -> None:
    path = with_tensors(write("smollm3", tmp_path / "model"), Q_NORM.format(1))
    with pytest.warns(UserWarning, match=r"^model: model\.layers\.1\.self_attn\.q_norm\.weight: no layer reads them"):
        load(path, threads=1, kernels=kernels)


def test_three_are_named_and_the_others_counted(tmp_path: Path) -> None:
    names = [f"model.layers.0.self_attn.extra.{i}.bias" for i in range(5)]
    path = with_tensors(write("smollm3", tmp_path / "model"), *names)
    with pytest.warns(UserWarning, match=r"extra\.0\.bias, \S*extra\.1\.bias, \S*extra\.2\.bias and 2 more: no layer"):
        load(path, threads=1)


def test_buffers_and_what_other_models_are_made_of_is_not(tmp_path: Path) -> None:
    """Among them a layer behind the last one, as files with layers for drafting have it."""
    path = write("smollm3", tmp_path / "model")
    with_tensors(
        path,
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.attn.bias",
        "visual.merger.weight",
        Q_NORM.format(99),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path, threads=1)


def test_keys_of_a_layer_that_reads_anothers_are_not(tmp_path: Path) -> None:
    path = write("gemma4_text", tmp_path / "model")
    decoder = load(path, threads=1).decoder
    assert isinstance(decoder, BaseDecoder)
    a = decoder.architecture
    last = a.layers - 1
    assert a.source(last) != last and a.source(0) == 0
    with_tensors(path, *(f"model.layers.{last}.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path, threads=1)
    with_tensors(path, "model.layers.0.self_attn.extra.weight")
    with pytest.warns(UserWarning, match=r"^model: model\.layers\.0\.self_attn\.extra\.weight: no layer"):
        load(path, threads=1)
