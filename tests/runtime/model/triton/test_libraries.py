"""Whole models with layers on libraries' products beside Triton's kernels: bits, class, and what is said of them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime import load
from runtime.checkpoints.architecture import configuration, describe
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Decoder, Rows
from runtime.errors import UserError
from runtime.kernels.dispatch import choose
from runtime.kernels.library_choice import Choice
from runtime.model.build import build
from runtime.model.layers import described
from runtime.model.triton.decoder import TritonDecoder

TinyPacked = Callable[[str], Path]
TOKENS = torch.tensor([5, 6, 7, 8, 9])


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[None]:
    """test_with_libraries.py has the probe; interpreted, it takes longer here than all the rest."""
    if device == "cpu":
        monkeypatch.setattr("runtime.kernels.triton.with_libraries.keeps_bits", lambda *_: True)
    yield


def logits(decoder: Decoder) -> torch.Tensor:
    cache = decoder.new_cache()
    return decoder.forward(TOKENS, Rows.chains([(cache.open(5), 0, 5)]), cache).logits


def test_the_integer_product_changes_no_bit_of_a_model(tiny_packed: TinyPacked, device: str, unprobed: None) -> None:
    found, plain = (
        load(tiny_packed("int8"), device=device, kernels=name).decoder for name in ("torch-int-mm", "triton")
    )
    assert isinstance(found, TritonDecoder) and isinstance(plain, TritonDecoder)
    assert found.exact and found.kernels == "torch-int-mm"
    # Two blocks of qkv, o, gate_up and down, and a head in floats.
    assert described(found) == "torch-int-mm; torch-int-mm in 8 of 9 layers" and described(plain) == "triton"
    assert torch.equal(logits(found), logits(plain))
    assert found.weight_bytes == plain.weight_bytes


def test_other_products_are_not_exact_and_say_so(tiny_packed: TinyPacked, device: str) -> None:
    found = load(tiny_packed("int8"), device=device, kernels="torch").decoder
    assert not found.exact and described(found) == "torch; torch in 1 of 9 layers"
    plain = logits(load(tiny_packed("int8"), device=device, kernels="triton").decoder)
    assert float((logits(found) - plain).norm() / plain.norm()) < 0.05


def test_a_library_that_takes_no_layer_is_refused(tiny_packed: TinyPacked, device: str) -> None:
    with pytest.raises(UserError, match="kernels='torch-int4' take none of this model's layers: they are for int4"):
        load(tiny_packed("int8"), device=device, kernels="torch-int4")


def test_a_table_that_fits_no_layer_leaves_them_to_triton(tiny_packed: TinyPacked, device: str) -> None:
    checkpoint = open_checkpoint(tiny_packed("int8"))
    architecture = describe(checkpoint.config)
    assert architecture is not None
    table = (Choice(None, "int4", 1, None, "torch-int4", False),)
    kernel = replace(choose("triton", device), name="library", exact=False, table=table)
    made = build(checkpoint, architecture, configuration(checkpoint), kernel, torch.device(device))
    assert not made.exact and described(made) == "library"


def test_what_is_said_of_other_decoders() -> None:
    draft = Path(__file__).parents[4] / "examples" / "pair" / "draft"
    assert described(load(draft, kernels="reference").decoder) == "reference"
    assert described(load(draft, adapter=True).decoder) == "transformers"
