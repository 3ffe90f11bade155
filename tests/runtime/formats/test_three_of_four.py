"""ternary-1.25: its specification's own decoder, nearest codes, files that come back, damaged ones, transformers."""

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime import formats, load
from runtime.contract import Rows
from runtime.errors import UserError
from runtime.formats import three_of_four
from runtime.formats.packed import PackedWeight
from runtime.kernels.reference import packed_linear
from tests.runtime.formats.damage import Damage, changed, without

Packed = Callable[..., PackedWeight]
PAGE = Path(__file__).parents[3] / "docs" / "ternary.md"


def specified() -> Callable[..., float]:
    """The decoder that the specification prints."""
    found = re.search(r"```python\n(def weight.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    known: dict[str, Any] = {}
    exec(found.group(1), known)
    made: Callable[..., float] = known["weight"]
    return made


def stored(made: PackedWeight) -> dict[str, Tensor]:
    return formats.to_tensors(replace(made, scale=made.scale.bfloat16().float()), "layer", torch.bfloat16)


@pytest.mark.parametrize("k", [1, 3, 4, 21, 32, 50])
def test_the_reader_reads_what_the_specification_says(packed: Packed, k: int) -> None:
    n, weight = 7, specified()
    tensors = stored(packed("ternary-1.25", n, k))
    patterns, scale = tensors["layer.weight_patterns"].tolist(), tensors["layer.weight_scale"].float().tolist()
    wanted = [[weight(patterns, scale, i, j) for j in range(k)] for i in range(n)]
    assert torch.equal(formats.dequantize(three_of_four.from_tensors(tensors, "layer")), torch.tensor(wanted))


def test_patterns_are_all_ways_to_have_one_zero_of_four() -> None:
    ways = {c for c in itertools.product((-1, 0, 1), repeat=4) if c.count(0) == 1}
    assert {tuple(codes) for codes in three_of_four.table().tolist()} == ways and len(ways) == 32
    codes = torch.tensor(sorted(ways), dtype=torch.int8)
    assert torch.equal(three_of_four.decode(three_of_four.encode(codes), 4), codes)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 30, 63, 64])
def test_a_file_comes_back(packed: Packed, k: int) -> None:
    made = packed("ternary-1.25", 9, k, bias=True)
    assert made.bias is not None
    made = replace(made, scale=made.scale.bfloat16().float(), bias=made.bias.bfloat16().float())
    tensors = formats.to_tensors(made, "layer", torch.bfloat16)
    back = formats.read(formats.hf_config({"layer": made.scheme}), tensors, "layer")
    assert isinstance(back, PackedWeight) and back.bias is not None and made.bias is not None
    assert back.scheme == made.scheme and torch.equal(back.codes, made.codes)
    assert torch.equal(back.scale, made.scale) and torch.equal(back.bias, made.bias)


@given(n=st.integers(1, 5), k=st.integers(1, 14), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_no_other_codes_and_scale_are_nearer(n: int, k: int, seed: int) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).double()
    codes, scale = three_of_four.nearest(weight)
    found = (weight - codes * scale).square().sum(1)
    # For any codes the best scale leaves |w|² − (w · c)² / |c|²; fours do not touch each other's share of w · c.
    whole, rest = k // 4 * 4, k % 4
    share = (weight[:, :whole].abs().view(n, k // 4, 4).sort(-1).values[..., 1:]).sum((1, 2))
    sizes = weight[:, whole:].abs().sort(-1, descending=True).values
    best = torch.full((n,), torch.inf).double()
    for kept in {max(rest - 1, 0), rest}:
        count = max(k // 4 * 3 + kept, 1)
        best = torch.minimum(best, weight.square().sum(1) - (share + sizes[:, :kept].sum(1)).square() / count)
    # All of a last four that is cut short are kept, which may be a little worse than leaving one out.
    assert (found >= best - 1e-6).all() and (rest > 0 or torch.allclose(found, best, atol=1e-5))
    assert (codes[:, :whole].view(n, k // 4, 4) == 0).sum(-1).eq(1).all()


def test_equal_magnitudes_and_zeros_have_one_zero_too() -> None:
    weight = torch.tensor([[0.5, -0.5, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0]])
    made = three_of_four.pack(weight)
    assert made.codes.tolist() == [[0, -1, 1, -1, 0, 1, 1, 1, -1, 0]]
    assert float(three_of_four.pack(torch.zeros(2, 8)).scale.min()) > 0
    with pytest.raises(ValueError, match="NaN or infinite"):
        three_of_four.pack(torch.tensor([[1.0, float("inf"), 1.0, 1.0]]))
    with pytest.raises(ValueError, match="one scale per output row"):
        three_of_four.pack(weight, 4)


def test_it_is_exactly_two_bit_ternary(packed: Packed) -> None:
    made, x = packed("ternary-1.25", 40, 70), torch.randn(5, 70)
    same = three_of_four.as_ternary(made)
    assert same.scheme.kind == "ternary" and torch.equal(formats.dequantize(made), formats.dequantize(same))
    assert torch.equal(packed_linear(made)(x), packed_linear(same)(x))
    with pytest.raises(ValueError, match=r"expected ternary-1.25, found ternary"):
        three_of_four.as_ternary(same)


@pytest.mark.parametrize(("at", "code"), [((1, 2), 2), ((0, 5), -2), ((2, 0), 0), ((3, 9), 0)])
def test_codes_that_no_pattern_gives_are_not_written(at: tuple[int, int], code: int) -> None:
    codes = three_of_four.decode(torch.full((4, 3), 1, dtype=torch.uint8), 11)  # zeros at 0, 4 and 8
    assert three_of_four.encode(codes).shape == (4, 3)
    codes = codes.roll(1, dims=1) if at == (2, 0) else codes
    codes[at] = code
    with pytest.raises(ValueError, match="exactly one 0; found others"):
        three_of_four.encode(codes)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (without("layer.weight_shape"), "tensor layer.weight_shape is missing"),
        (without("layer.weight_scale"), "tensor layer.weight_scale is missing"),
        (changed("layer.weight_patterns", lambda t: t[1:]), "tensor layer.weight_patterns has shape"),
        (changed("layer.weight_patterns", Tensor.float), "tensor layer.weight_patterns must be uint8"),
        (changed("layer.weight_shape", lambda t: -t), "tensor layer.weight_shape must hold two positive sizes"),
        (changed("layer.weight_shape", lambda t: t + 100), "tensor layer.weight_patterns has shape"),
        (changed("layer.weight_scale", lambda t: t * torch.nan), "tensor layer.weight_scale"),
    ],
)
def test_damaged_files_are_told_of(packed: Packed, damage: Damage, told: str) -> None:
    tensors = stored(packed("ternary-1.25", 8, 24))
    assert three_of_four.from_tensors(tensors, "layer").shape == (8, 24)
    damage(tensors)
    with pytest.raises(UserError, match=re.escape(told)):
        three_of_four.from_tensors(tensors, "layer")


def test_configurations_of_later_versions_and_malformed_ones_are_refused() -> None:
    config = formats.hf_config({"a": three_of_four.scheme()}, ["lm_head"])
    formats.check_supported(config)
    for key, value in (("version", 2), ("layers", None), ("layers", [3])):
        with pytest.raises(UserError, match=f"quantization_config.{key}"):
            formats.check_supported(config | {key: value})


def test_transformers_loads_it_and_agrees(tiny_packed: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    import runtime.formats.transformers  # noqa: F401  (registers the format)

    folder = tiny_packed("ternary-1.25")
    assert (
        json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == three_of_four.METHOD
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(1, 300, (12,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(tokens[None]).logits[0]
    decoder = load(folder).decoder
    cache = decoder.new_cache()
    found = decoder.forward(tokens, Rows.chains([(cache.open(12), 0, 12)]), cache).logits
    # Ours rounds inputs to int8, theirs does not.
    assert float((found - wanted).norm() / wanted.norm()) < 0.03
    assert type(theirs.model.layers[0].self_attn.q_proj).__name__ == "TernaryLinear"
