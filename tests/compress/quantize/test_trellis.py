"""GPTQ's feedback over trellis columns: nearer than GPTQ with integers, and no pass makes the error larger."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.quantize import gptq, trellis
from compress.quantize.grid import Grid
from runtime import native
from runtime.devices import torch_threads
from runtime.formats import dequantize, to_tensors
from runtime.formats.trellis import BITS, decode, pack
from runtime.native.trellis import encode_tiles

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


@pytest.mark.parametrize("k", [128, 300])
def test_blocks_of_columns_change_nothing_but_the_rounding_of_sums(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """What a column leaves reaches those of its block and those behind it, as where every column is a block."""
    weight, hessian = problem(40, k)
    errors = {}
    for block in (trellis.TILE, trellis.BLOCK, 10 * k // trellis.TILE * trellis.TILE):
        monkeypatch.setattr(trellis, "BLOCK", block)
        for passes in (0, 1):
            found = trellis.quantize_together([weight], hessian, 3, torch.float32, passes=passes)[0].error
            assert found == pytest.approx(errors.setdefault(passes, found), rel=0.01)
    assert errors[1] < 0.98 * errors[0]


@pytest.mark.parametrize(("n", "k"), [(16, 16), (33, 50), (5, 7)])
def test_what_was_found_can_be_written(n: int, k: int) -> None:
    weight, hessian = problem(n, k)
    (rounded,) = trellis.quantize_together([weight], hessian, 3, torch.bfloat16)
    packed = rounded.packed
    assert packed.tiles is not None and packed.shape == (n, k)
    assert torch.equal(decode(packed.tiles.sequences, packed.tiles.levels, 3, (n, k)), packed.codes)
    assert to_tensors(packed, "layer", torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_zeros_stay_as_good_as_zeros(dtype: torch.dtype) -> None:
    """No level is 0, so the scale has to be next to nothing; rows beside them are as they would be without."""
    weight, hessian = problem(48, 64)
    weight[[3, 20, 21, 40]] = 0
    (rounded,) = trellis.quantize_together([weight], hessian, 3, dtype)
    found = dequantize(rounded.packed)
    assert found[[3, 20, 21, 40]].abs().max() < 1e-5 and error_of(weight, found, hessian) < 0.13
    assert rounded.error == pytest.approx(error_of(weight, found, hessian), rel=1e-3)
    plain = dequantize(pack(weight, bits=3, scale_dtype=dtype))
    assert plain[[3, 20, 21, 40]].abs().max() < 1e-5 and float((plain - weight).norm() / weight.norm()) < 0.15


def test_inputs_that_never_occur_are_rounded_to_near_where_they_were() -> None:
    weight, _ = problem(20, 40)
    for seen in (0, 5):
        hessian = torch.diag((torch.arange(40) < seen).float())
        (rounded,) = trellis.quantize_together([weight], hessian, 3, torch.bfloat16)
        assert float((dequantize(rounded.packed) - weight).norm() / weight.norm()) < 0.2
        assert rounded.error < 0.2


def test_together_is_as_alone_whatever_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, hessian), (two, _) = problem(40, 64), problem(24, 64, 1)
    taken = set()

    def watched(*args: Any, again: bool, threads: int) -> None:
        taken.add(threads)
        encode_tiles(*args, again=again, threads=threads)

    monkeypatch.setattr(trellis, "encode_tiles", watched)
    with torch_threads(3):
        together = trellis.quantize_together([one, two], hessian, 3, torch.bfloat16)
    assert taken == {3}
    for weight, found in zip((one, two), together, strict=True):
        with torch_threads(1):
            (alone,) = trellis.quantize_together([weight], hessian, 3, torch.bfloat16)
        assert torch.equal(alone.packed.codes, found.packed.codes)
    assert taken == {1, 3}


def test_weights_of_one_size_are_nearer() -> None:
    g = torch.Generator().manual_seed(2)
    sizes = torch.rand(96, generator=g) * 3 + 0.1
    weight, hessian = problem(48, 96)
    weight = weight * sizes
    factor = trellis.channel_factors([weight], lambda statistic: statistic)
    assert torch.allclose(
        (weight * factor).square().sum(dim=0).log(), (weight[:, :1] * factor[:1]).square().sum().log()
    )
    (plain,) = trellis.quantize_together([weight], hessian, 3, torch.bfloat16)
    scaled = hessian / factor / factor.unsqueeze(1)
    (better,) = trellis.quantize_together([weight * factor], scaled, 3, torch.bfloat16)
    assert better.error < 0.95 * plain.error


def test_inputs_without_weights_keep_their_size() -> None:
    weight = torch.randn(16, 4) * torch.tensor([1.0, 0.0, 4.0, 1.0])
    factor = trellis.channel_factors([weight], lambda statistic: statistic)
    assert float(factor[1]) == 1 and float(factor[2]) < float(factor[0])
    assert torch.equal(trellis.channel_factors([weight * 0], lambda statistic: statistic), torch.ones(4))


@pytest.mark.parametrize("bits", BITS)
def test_apart_is_together_with_inputs_that_have_nothing_in_common(bits: int) -> None:
    weight, hessian = problem(21, 40)
    (together,) = trellis.quantize_together([weight], hessian.diagonal().diag(), bits, torch.bfloat16, 0.0, passes=0)
    apart = trellis.quantize_apart(weight, hessian.diagonal(), bits, torch.bfloat16)
    assert torch.equal(dequantize(apart.packed), dequantize(together.packed))
    assert apart.error == pytest.approx(together.error, rel=1e-5) and apart.error > 0
    # What counts more is rounded better, over many rows.
    weight, hessian = problem(250, 40)
    counted = hessian.diagonal() * torch.linspace(0.1, 1, 40) ** 4
    found = [
        error_of(weight, dequantize(trellis.quantize_apart(weight, by, bits, torch.bfloat16).packed), counted.diag())
        for by in (counted, hessian.diagonal())
    ]
    assert found[0] < found[1]


def test_bad_input_is_refused() -> None:
    weight, hessian = problem(16, 32)
    with pytest.raises(ValueError, match="do not fit a Hessian"):
        trellis.quantize_together([weight[:, :16]], hessian, 3, torch.bfloat16)
    with pytest.raises(ValueError, match="the weight has values that are NaN"):
        trellis.quantize_together([weight / 0], hessian, 3, torch.bfloat16)
    with pytest.raises(ValueError, match="the weight has values that are NaN"):
        trellis.quantize_apart(weight / 0, hessian.diagonal(), 3, torch.bfloat16)
