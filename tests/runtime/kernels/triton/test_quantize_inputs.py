"""Rounding of inputs in Triton, alone and fused with what comes before it, against the reference."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.formats.packed import PackedWeight
from runtime.kernels import reference
from runtime.kernels.activations import gelu_tanh, silu

pytest.importorskip("triton")

from runtime.kernels.triton.quantize_inputs import (
    Rounded,
    Rounding,
    gated_quantize,
    norm_quantize,
    quantize,
    rounding,
)
from runtime.kernels.triton.weights import gpu_weight

Packed = Callable[..., PackedWeight]
# Kind, inputs, group, rest.
CASES = {
    "rows": ("int8", 200, 0, {}),
    "one block and a bit": ("int8", 4100, 0, {"offset": True}),
    "static": ("int8", 130, 0, {"static": True}),
    "groups": ("int4", 200, 32, {"offset": True}),
    "order": ("int4", 130, 64, {"perm": True}),
    "odd groups": ("int4", 130, 24, {}),
    "static groups": ("int4", 200, 96, {"static": True, "offset": True}),
}


def asked(packed: Packed, name: str, device: torch.device) -> tuple[PackedWeight, Rounding]:
    kind, k, group, rest = CASES[name]
    weight = packed(kind, 3, k, group, **rest)  # type: ignore[arg-type]
    how = rounding(gpu_weight(weight, None, device))
    assert how is not None
    return weight, how


def expected(weight: PackedWeight, x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (T, G, group) and steps (T, G) by the reference."""
    k = weight.shape[1]
    size = weight.scheme.group_size or k
    if weight.perm is not None:
        x = x[:, weight.perm]
    x = torch.nn.functional.pad(x, (0, -k % size)).view(len(x), -1, size)
    static = weight.input_scale
    return reference.quantize_rows(x) if static is None else reference.quantize_static(x, static)


def check(found: Rounded, weight: PackedWeight, x: Tensor) -> None:
    """Every bit of the codes, steps and sums, and zeros wherever nothing is."""
    codes, step = expected(weight, x)
    cut, (rows, groups, size) = found.how.cut, codes.shape
    there = found.codes.cpu().view(rows, cut.columns, cut.padded)
    assert torch.equal(there[:, :groups, :size], codes)
    assert int(there.count_nonzero()) == int(codes.count_nonzero())
    assert torch.equal(found.step.cpu()[:, :groups], step)
    assert (found.sums is not None) == (weight.offset is not None)
    if found.sums is not None:
        assert torch.equal(found.sums.cpu()[:, :groups], codes.sum(-1).int())


@pytest.mark.parametrize("name", CASES)
def test_has_the_bits_of_the_reference(name: str, packed: Packed, device: torch.device) -> None:
    weight, how = asked(packed, name, device)
    x = torch.randn(18, weight.shape[1], generator=torch.Generator().manual_seed(2))
    x[3] = 0.0
    x[4, 9] = 300.0
    # Steps whose inverse is beyond float32, ties, and values beside them.
    x[5] = 1e-44
    x[6] = torch.arange(weight.shape[1]) % 254 / 2 - 63.5
    check(quantize(x.to(device), how), weight, x)


def test_a_nan_is_told_by_its_step(packed: Packed, device: torch.device) -> None:
    for name in ("rows", "static", "groups", "static groups"):
        weight, how = asked(packed, name, device)
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(3))
        x[1, 50] = torch.nan
        found, step = quantize(x.to(device), how).step.cpu(), expected(weight, x)[1]
        assert torch.equal(found[:, : step.shape[1]].isnan(), step.isnan())


@pytest.mark.parametrize("name", ["rows", "groups", "order"])
def test_gated_forms_have_the_bits_of_the_reference(name: str, packed: Packed, device: torch.device) -> None:
    weight, how = asked(packed, name, device)
    k = weight.shape[1]
    both = torch.randn(5, 2 * k, generator=torch.Generator().manual_seed(4)) * 4
    both[0, :4] = torch.tensor([-100.0, 100.0, -88.0, 0.0])
    gate, up = both.split(k, dim=1)
    on_device = both.to(device).split(k, dim=1)
    check(gated_quantize(*on_device, "silu", how), weight, silu(gate) * up)
    check(gated_quantize(*on_device, "gelu_tanh", how), weight, gelu_tanh(gate) * up)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("name", ["rows", "groups", "order"])
def test_norms_are_the_reference_up_to_their_sum(
    name: str, offset: float, packed: Packed, device: torch.device
) -> None:
    weight, how = asked(packed, name, device)
    k = weight.shape[1]
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(18, k, generator=generator)
    norm = torch.randn(k, generator=generator) * 0.1 + 1.0 - offset
    found = norm_quantize(x.to(device), norm.to(device), 1e-5, how, offset)
    normed = reference.rms_norm(x, norm, 1e-5, offset)
    codes, step = expected(weight, normed)
    groups, size = codes.shape[1:]
    there = found.codes.cpu().view(18, how.cut.columns, how.cut.padded)[:, :groups, :size]
    # The squares are added in another order: a step's last bits differ, and a code beside a tie may.
    assert torch.allclose(found.step.cpu()[:, :groups], step, rtol=1e-6)
    assert (there.int() - codes.int()).abs().max() <= 1
    assert (there != codes).float().mean() < 1e-3
    for width in (1, 5):
        part = norm_quantize(x[:width].to(device), norm.to(device), 1e-5, how, offset)
        assert torch.equal(part.codes, found.codes[:width])
        assert torch.equal(part.step, found.step[:width])


def test_one_rounding_serves_weights_that_read_alike(packed: Packed, device: torch.device) -> None:
    plain, zeros = (gpu_weight(packed("int4", 3, 200, 32, offset=o), None, device) for o in (False, True))
    other = gpu_weight(packed("int4", 3, 200, 64), None, device)
    how = rounding(plain, zeros)
    assert how is not None
    assert how.sums
    assert rounding(plain, other) is None
    ordered = gpu_weight(packed("int4", 3, 200, 32, perm=True), None, device)
    assert rounding(plain, ordered) is None
    alone = rounding(plain)
    assert alone is not None
    assert how.serves(alone)
    assert not alone.serves(how)
    assert not replace(how, perm=ordered.perm).serves(how)
