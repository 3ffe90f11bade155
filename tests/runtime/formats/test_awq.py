"""AWQ's layout "gemm": packed here a second way, nibble by nibble, and by GPTQModel where it is installed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime import formats
from runtime.errors import UserError
from runtime.formats import awq
from runtime.formats.packed import PackedWeight

SHAPES = [(8, 64), (24, 96), (40, 128)]


def words(values: Tensor) -> Tensor:
    """(rows, N) from 0 to 15: the nibble at 4i of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight."""
    eights = values.numpy().astype(np.uint32).reshape(values.shape[0], -1, 8)
    out = np.zeros(eights.shape[:2], dtype=np.uint32)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        out |= eights[:, :, column] << np.uint32(4 * place)
    return torch.from_numpy(out.view(np.int32))


def stored(
    n: int, k: int, group: int, seed: int = 0, sym: bool = False
) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """A random layer "a.b" as a file has it, its weights (N, K) float32, and its configuration."""
    g, size = torch.Generator().manual_seed(seed), k if group == -1 else group
    codes = torch.randint(0, 16, (k, n), generator=g)
    zeros = torch.full((k // size, n), 8) if sym else torch.randint(0, 16, (k // size, n), generator=g)
    if not sym:
        zeros[0, 0], zeros[-1, -1] = 0, 15
    scales = (torch.rand(k // size, n, generator=g) * 0.05 + 0.001).half()
    tensors = {
        "a.b.qweight": words(codes),
        "a.b.qzeros": words(zeros),
        "a.b.scales": scales,
        "a.b.bias": torch.randn(n, generator=g).half(),
    }
    index = torch.arange(k) // size
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return tensors, ((codes - zeros[index]).float() * scales[index].float()).T, config


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> PackedWeight:
    formats.check_supported(config)
    packed = formats.read(config, tensors, "a.b")
    assert isinstance(packed, PackedWeight)
    return packed


@pytest.mark.parametrize("group", [-1, 32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_layers_are_read_and_written_exactly(n: int, k: int, group: int) -> None:
    for sym in (False, True):
        tensors, weights, config = stored(n, k, group, sym=sym)
        packed = read(config, tensors)
        assert torch.equal(formats.dequantize(packed), weights)
        assert packed.scheme.symmetric == sym and packed.scheme.group_size == max(group, 0)
        assert torch.equal(packed.bias, tensors["a.b.bias"].float())
        again = awq.to_tensors(packed, "a.b", torch.float16)
        assert again.keys() == tensors.keys()
        assert all(
            torch.equal(again[name], tensor) and again[name].dtype == tensor.dtype for name, tensor in tensors.items()
        )
        smaller = awq.to_tensors(packed, "a.b", torch.float16, group_size=16)
        assert torch.equal(formats.dequantize(read(config | {"group_size": 16}, smaller)), weights)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 6), groups=st.integers(1, 5), group=st.sampled_from([1, 3, 8, 32]), seed=st.integers(0, 99))
def test_any_layer_survives(n: int, groups: int, group: int, seed: int) -> None:
    tensors, weights, config = stored(8 * n, groups * group, group, seed)
    packed = read(config, tensors)
    assert torch.equal(formats.dequantize(packed), weights)
    assert all(
        torch.equal(tensor, tensors[name]) for name, tensor in awq.to_tensors(packed, "a.b", torch.float16).items()
    )


def test_what_cannot_be_held_is_refused(packed: Callable[..., PackedWeight]) -> None:
    tensors, _, config = stored(16, 64, 32)
    good = read(config, tensors)
    for bad, message in (
        (packed("int8", 16, 64), "holds 4-bit integers"),
        (packed("int4", 16, 64, 32, perm=True), "in input order"),
        (packed("int4", 12, 64, 32), "no multiple of 8"),
        (PackedWeight(good.scheme, good.codes, good.scale + 1e-6), "float16 cannot hold"),
        (PackedWeight(good.scheme, good.codes, good.scale, good.scale * 9), "zero points of 0 to 15"),
        (PackedWeight(good.scheme, good.codes, good.scale, good.scale * 0.3), "whole zero points"),
    ):
        with pytest.raises(ValueError, match=message):
            awq.to_tensors(bad, "x")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qweight", lambda t: t.long(), "a.b.qweight must be int32"),
        ("qweight", lambda t: t[0], "a.b.qweight must have two dimensions"),
        ("qweight", lambda t: t[:-1], "groups of 32 .* do not divide"),
        ("qweight", lambda t: t[:32], r"a.b.qzeros has shape \[2, 3\], expected \[1, 3\]"),
        ("qzeros", lambda t: t[:, :1], "a.b.qzeros has shape"),
        ("scales", lambda t: t[:, :8], "a.b.scales has shape"),
        ("scales", lambda t: t / 0, "a.b.scales must be finite"),
        ("bias", lambda t: t[:8], "a.b.bias has shape"),
    ],
)
def test_damaged_layers_are_one_sentence(name: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    tensors, weights, config = stored(24, 64, 32)
    assert torch.equal(formats.dequantize(read(config, tensors)), weights)
    with pytest.raises(UserError, match=message) as caught:
        read(config, tensors | {f"a.b.{name}": change(tensors[f"a.b.{name}"])})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"bits": 8}, {"group_size": 0}, {"version": "gemv"}, {"group_size": None}])
def test_configurations_that_are_not_read(changes: dict[str, Any]) -> None:
    formats.check_supported(stored(8, 32, 32)[2])
    with pytest.raises(UserError, match="quantization_config"):
        formats.check_supported(stored(8, 32, 32)[2] | changes)


def test_gptqmodel_agrees() -> None:
    pytest.importorskip("gptqmodel", reason="GPTQModel is not in the test environment")
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    tensors, weights, _ = stored(64, 96, 32)
    parts = (tensors[f"a.b.{part}"] for part in ("qweight", "qzeros", "scales"))
    assert torch.equal(dequantize_gemm(*parts, 4, 32).float().T, weights.half().float())
