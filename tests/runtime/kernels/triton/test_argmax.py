"""The largest logit and the experts of a row."""

import pytest
import torch

pytest.importorskip("triton")

from runtime.kernels.exact import exp, tree_sum
from runtime.kernels.triton.argmax import largest, route


def test_largest(device: torch.device) -> None:
    """Over the border of a piece, the first of equals, and rows that are none."""
    x = torch.randn(9, 4100, generator=torch.Generator().manual_seed(0))
    x[0, 4097] = 9.0
    x[1, [7, 4098]] = 9.0
    x[2, [4097, 4096]] = 9.0
    x[3, 5], x[4, 4099], x[5] = torch.nan, torch.inf, -torch.inf
    x[6, :4099], x[7, 0] = -torch.inf, -torch.inf
    want = x.argmax(dim=1)
    want[3:6] = -1
    assert torch.equal(largest(x.to(device)).cpu(), want)
    # A limit: what is behind it is not chosen, and still must be a number.
    want = x[:, :4090].argmax(dim=1)
    want[3:7] = -1
    assert torch.equal(largest(x.to(device), 4090).cpu(), want)
    assert largest(x[:0].to(device)).shape == (0,)


@pytest.mark.parametrize(("experts", "count"), [(4, 2), (60, 6), (8, 1)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_route(device: torch.device, experts: int, count: int, renormalize: bool) -> None:
    scores = torch.randn(3, experts, generator=torch.Generator().manual_seed(1)) * 3
    odds = exp(scores - scores.amax(dim=-1, keepdim=True))
    odds = odds / tree_sum(odds).unsqueeze(-1)
    want, experts_of = odds.topk(count, dim=-1)
    if renormalize:
        want = want / tree_sum(want).unsqueeze(-1)
    shares, chosen = route(scores.to(device), count, renormalize)
    assert torch.equal(chosen.cpu(), experts_of) and torch.equal(shares.cpu(), want)
    ties, _ = route(torch.ones(1, experts, device=device), count, renormalize)
    assert torch.equal(route(torch.ones(1, experts, device=device), count, False)[1][0].cpu(), torch.arange(count))
    assert bool((ties == ties[0, 0]).all())
    ill = scores.to(device)
    ill[1, 0] = torch.nan
    assert bool(route(ill, count, renormalize)[0][1].isnan().all())
