"""What a block does between its products: the reference's bits, whatever the width."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from runtime.kernels import reference
from runtime.kernels.activations import gelu_tanh, silu
from runtime.kernels.triton.elementwise import Activation, embed, gated, rms_norm


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("width", [1, 7, 64, 100, 1500])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_have_the_references_bits(device: torch.device, width: int, offset: float) -> None:
    x, weight = normal(3, width + 5)[:, 3:-2].to(device), normal(width, seed=2).bfloat16().to(device)
    want = reference.rms_norm(x, weight.float(), 1e-6, offset)
    assert torch.equal(rms_norm(x, weight, 1e-6, offset), want)


@pytest.mark.parametrize(("activation", "theirs"), [("silu", silu), ("gelu_tanh", gelu_tanh)])
def test_activations_have_the_references_bits(
    device: torch.device, activation: Activation, theirs: Callable[[Tensor], Tensor]
) -> None:
    gate, up = (normal(2, 2500, scale=20.0).to(device)[:, part] for part in (slice(0, 1250), slice(1250, 2500)))
    gate = gate.clone()
    gate[0, :4] = torch.tensor([0.0, 100.0, -100.0, torch.nan])
    want = theirs(gate) * up
    got = gated(gate, up, activation)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embedding(device: torch.device, dtype: torch.dtype) -> None:
    table, tokens = normal(9, 1300).to(dtype).to(device), torch.tensor([8, 0, 3, -1], device=device, dtype=torch.int32)
    assert torch.equal(embed(tokens, table), table[[8, 0, 3, 0]].float())
    assert torch.equal(embed(tokens.long(), table, 7.3), table[[8, 0, 3, 0]].float() * 7.3)


def test_bits_at_every_width(device: torch.device) -> None:
    x, up, weight = normal(16, 96).to(device), normal(16, 96, seed=1).to(device), normal(96, seed=2).to(device)
    norms, gates = rms_norm(x, weight, 1e-5), gated(x, up, "silu")
    for width in (0, 1, 2, 5):
        assert torch.equal(rms_norm(x[16 - width :], weight, 1e-5), norms[16 - width :])
        assert torch.equal(gated(x[:width], up[:width], "silu"), gates[:width])
