"""Round to nearest by a recipe's words: which format, which grid, and bytes that count everything stored."""

from dataclasses import replace

import pytest
import torch

from compress.quantize import rtn
from compress.records import LayerRecord
from compress.report.size import bits_per_weight
from runtime import formats
from runtime.formats import int4, int8, nf4, ternary
from runtime.formats.packed import Scheme
from runtime.formats.schemes import named


def weights(n: int = 24, k: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(n, k, generator=generator) * 0.05 + 0.03).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("scheme", "group", "symmetric", "expected"),
    [
        ("int8-dynamic", 0, True, Scheme("int8", 8, 0, True, "int8-token")),
        ("int8-static", 0, True, Scheme("int8", 8, 0, True, "int8-tensor")),
        ("nf4", 64, True, Scheme("nf4", 4, 64, True, "int8-group")),
        ("ternary", 0, True, Scheme("ternary", 2, 0, True, "int8-token")),
        ("fp8", 0, True, Scheme("fp8", 8, 0, True, "float")),
        ("int4", 128, True, Scheme("int4", 4, 128, True, "int8-group")),
        ("int4", 32, False, Scheme("int4", 4, 32, False, "int8-group")),
        ("int6", 128, True, Scheme("int6", 6, 128, True, "int8-group")),
        ("int5", 64, False, Scheme("int6", 5, 64, False, "int8-group")),
        ("int3", 64, True, Scheme("int4", 3, 64, True, "int8-group")),
        ("int3", 0, False, Scheme("int4", 3, 0, False, "int8-group")),
        ("int2", 32, False, Scheme("int4", 2, 32, False, "int8-group")),
    ],
)
def test_what_is_described_is_what_is_made_and_stored(
    scheme: str, group: int, symmetric: bool, expected: Scheme
) -> None:
    assert named(scheme).scheme(group, symmetric) == expected
    step = 0.25 if scheme == "int8-static" else None
    packed = rtn.quantize(weights(), scheme, group, symmetric=symmetric, input_scale=step)
    assert packed.scheme == expected and (packed.offset is None) == symmetric
    assert (packed.input_scale is None) == (step is None) and packed.input_scale in (None, 0.25)
    tensors = formats.to_tensors(packed, "x", torch.bfloat16)
    assert ("x.weight_zero_point" in tensors) == (not symmetric) and ("x.input_scale" in tensors) == (step is not None)
    # Three bits of mantissa are coarser than int8 where no weight is far out.
    bound = 0.04 if scheme == "fp8" else {8: 0.01, 6: 0.04, 5: 0.08, 4: 0.15, 3: 0.35, 2: 0.7}[packed.scheme.bits]
    assert rtn.relative_error(weights(), formats.dequantize(packed)) < bound


def test_fewer_bits_are_further_off_and_zero_points_are_nearer() -> None:
    def error(scheme: str, symmetric: bool = True) -> float:
        packed = rtn.quantize(weights(), scheme, 32, symmetric=symmetric)
        return rtn.relative_error(weights(), formats.dequantize(packed))

    assert error("int6") < error("int5") < error("int4") < error("int3") < error("int2")
    for scheme in ("int6", "int5", "int4", "int3", "int2"):
        assert error(scheme, symmetric=False) < error(scheme)


def test_the_files_own_arithmetic_is_used() -> None:
    for scheme, packed in (
        ("int8-dynamic", int8.pack(weights())),
        ("int6", int4.pack(weights(), 64, bits=6)),
        ("int3", int4.pack(weights(), 64, bits=3)),
        ("nf4", nf4.pack(weights())),
        ("ternary", ternary.pack(weights())),
    ):
        made = rtn.quantize(weights(), scheme, 0 if scheme in ("int8-dynamic", "ternary") else 64)
        assert torch.equal(made.codes, packed.codes) and torch.equal(made.scale, packed.scale)


def test_words_that_do_not_go_together_are_refused() -> None:
    for scheme, options in (
        ("int8-static", {}),
        ("int4", {"input_scale": 0.1}),
        ("nf4", {"symmetric": False}),
        ("ternary", {"symmetric": False}),
        ("int8-dynamic", {"symmetric": False}),
        ("int7", {}),
    ):
        with pytest.raises(ValueError, match=f"scheme '{scheme}'"):
            rtn.quantize(weights(), scheme, 64, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("scheme", "bits"), [("int6", 6), ("int5", 5), ("int4", 4), ("int3", 3), ("int2", 2)])
def test_stored_bits_count_zero_points_and_input_order(scheme: str, bits: int) -> None:
    """As the pipeline counts them: all the tensors of a layer without bias."""
    packed = rtn.quantize(weights(64, 512), scheme, 128, symmetric=False)
    for perm, extra in ((None, 0.0), (torch.arange(511, -1, -1), 32 / 64)):
        stored = formats.to_tensors(replace(packed, perm=perm), "x", torch.bfloat16)
        bytes_ = sum(t.numel() * t.element_size() for t in stored.values())
        record = LayerRecord("x", scheme, 128, 64 * 512, bytes_, 0.1)
        assert bits_per_weight([record]) == bits + (16 + bits) / 128 + 128 / (64 * 512) + extra
