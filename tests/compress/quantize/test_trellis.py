"""GPTQ's feedback over trellis columns: nearer than GPTQ with integers, and no pass makes the error larger."""

import pytest
import torch
from torch import Tensor

from compress.quantize import gptq, trellis
from compress.quantize.grid import Grid
from runtime import native
from runtime.formats import dequantize, to_tensors
from runtime.formats.trellis import BITS, decode, pack
from runtime.formats.trellis_levels import LEVELS

pytestmark = pytest.mark.skipif(not native.usable("portable")[0], reason=native.usable("portable")[1])


def problem(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mixed = torch.randn(k, k, generator=g) / k**0.5 + torch.eye(k)
    x = torch.randn(4 * k, k, generator=g) @ mixed * torch.rand(k, generator=g)
    return torch.randn(n, k, generator=g) * 0.02, x.T @ x / len(x)


def error_of(weight: Tensor, found: Tensor, hessian: Tensor) -> float:
    lost = (weight - found).double()
    whole = weight.double()
    return float(((lost @ hessian.double() * lost).sum() / (whole @ hessian.double() * whole).sum()).sqrt())


@pytest.mark.parametrize("bits", BITS)
def test_it_is_nearer_than_gptq_with_as_many_bits(bits: int) -> None:
    weight, hessian = problem(64, 128)
    (ours,) = trellis.quantize_together([weight], hessian, bits, torch.bfloat16)
    (theirs,) = gptq.quantize_together([weight], hessian, Grid(bits, 32), torch.bfloat16)
    found = error_of(weight, dequantize(ours.packed), hessian)
    assert found == pytest.approx(ours.error, rel=1e-3)
    assert found < 0.85 * error_of(weight, dequantize(theirs.packed), hessian)


def test_passes_make_the_error_smaller() -> None:
    weight, hessian = problem(48, 96)
    errors = [
        trellis.quantize_together([weight], hessian, 2, torch.float32, passes=passes)[0].error for passes in range(4)
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0]


@pytest.mark.parametrize(("n", "k"), [(16, 16), (33, 50), (5, 7)])
def test_what_was_found_can_be_written(n: int, k: int) -> None:
    weight, hessian = problem(n, k)
    (rounded,) = trellis.quantize_together([weight], hessian, 3, torch.bfloat16)
    packed = rounded.packed
    assert packed.tiles is not None and packed.shape == (n, k)
    assert torch.equal(decode(packed.tiles.sequences, packed.tiles.levels, 3, (n, k)), packed.codes)
    assert to_tensors(packed, "layer", torch.bfloat16)


def test_together_is_as_alone_whatever_the_threads() -> None:
    (one, hessian), (two, _) = problem(40, 64), problem(24, 64, 1)
    together = trellis.quantize_together([one, two], hessian, 3, torch.bfloat16)
    for weight, found in zip((one, two), together, strict=True):
        (alone,) = trellis.quantize_together([weight], hessian, 3, torch.bfloat16)
        assert torch.equal(alone.packed.codes, found.packed.codes)


@pytest.mark.parametrize("bits", BITS)
def test_levels_fit_what_they_are_fitted_to(bits: int) -> None:
    """Weights with heavy tails: fitted levels lose less than those for normal weights."""
    g = torch.Generator().manual_seed(2)
    weight = torch.randn(64, 64, generator=g) * torch.rand(64, 64, generator=g).pow(2)
    scale = pack(weight, bits=bits).scale
    levels = trellis.fit_levels((weight / scale).T.contiguous(), bits)
    assert levels.shape == (128,) and int(levels.abs().max()) == 127
    assert not torch.equal(levels, LEVELS[bits])


def test_the_levels_are_what_lloyds_rule_finds_of_normal_weights() -> None:
    """A few more turns over other normal weights change little."""
    g = torch.Generator().manual_seed(4)
    for bits in BITS:
        size = LEVELS[bits].float().square().mean().sqrt()
        units = torch.randn(16, 4096, generator=g) * size
        again = trellis.fit_levels(units, bits, fits=1)
        assert float((again.float() - LEVELS[bits].float()).square().mean().sqrt() / size) < 0.1


def test_bad_input_is_refused() -> None:
    weight, hessian = problem(16, 32)
    with pytest.raises(ValueError, match="do not fit a Hessian"):
        trellis.quantize_together([weight[:, :16]], hessian, 3, torch.bfloat16)
    with pytest.raises(ValueError, match="the weight has values that are NaN"):
        trellis.quantize_together([weight / 0], hessian, 3, torch.bfloat16)
