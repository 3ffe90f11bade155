"""The basis that keys and values are rounded in: what the decomposition promises, and what it saves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.quantize.cache_basis import SHARES, basis_of, best_basis, rounding_cost, triangular
from runtime.kernels.basis import BACK, FEEDBACK, INTO, turned
from runtime.kv_store import IN_BASIS


def uneven(size: int, seed: int) -> Tensor:
    """(size, size) float64 whose singular values span three orders."""
    g = torch.Generator().manual_seed(seed)
    left, right = torch.randn(2, size, size, generator=g, dtype=torch.float64)
    return left @ torch.diag(torch.logspace(-2, 1, size, dtype=torch.float64)) @ right / size


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 40), spread=st.floats(0, 4), fine=st.integers(0, 20), seed=st.integers(0, 1000))
def test_the_diagonal_is_as_it_is_to_be(size: int, spread: float, fine: int, seed: int) -> None:
    values = (spread * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).exp()
    shares = torch.where(torch.arange(size) < fine, 2.0, 1.0).double()
    q, r = triangular(values, shares)
    torch.testing.assert_close(q.T @ q, torch.eye(size, dtype=torch.float64))
    assert torch.equal(r, r.triu())
    torch.testing.assert_close(
        q @ r @ r.T @ q.T, torch.diag(values**2), rtol=1e-6, atol=1e-6 * float(values.max()) ** 2
    )
    # Possible where the largest n values have at least the product of the largest n entries, whatever n.
    wanted = shares * (values.log().mean() - shares.log().mean()).exp()
    sums = [part.log().sort(descending=True).values.cumsum(0) for part in (values, wanted)]
    if bool((sums[0] >= sums[1] - 1e-9).all()):
        torch.testing.assert_close(r.diagonal(), wanted, rtol=1e-6, atol=0)
    else:
        assert min(fine, size - fine) > 0 and not torch.allclose(r.diagonal(), wanted)


@pytest.mark.parametrize("size", [1, 7, 48])
def test_scores_and_values_come_back(size: int) -> None:
    """Without rounding a key's score with any query is what it was, and a mixed value too."""
    moment, cost = (m @ m.T for m in (uneven(size, 1), uneven(size, 2)))
    x = torch.randn(5, 1, size, generator=torch.Generator().manual_seed(3))
    q = torch.randn(5, 1, size, generator=torch.Generator().manual_seed(4))
    keys, values = (basis_of(moment, cost, queries)[None] for queries in (True, False))
    assert torch.equal(keys[0, FEEDBACK], keys[0, FEEDBACK].tril(-1))
    got = (turned(x, keys[:, INTO]) * turned(q, keys[:, BACK])).sum(-1)
    torch.testing.assert_close(got, (x * q).sum(-1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(turned(turned(x, values[:, INTO]), values[:, BACK]), x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["int4", "int3"])
def test_rounding_costs_less(kind: str) -> None:
    """Than rounding the rows as they are, and than rounding what a random rotation makes of them."""
    size, g = 64, torch.Generator().manual_seed(5)
    of, cost = uneven(size, 6), uneven(size, 7)
    x, cost = (torch.randn(2000, size, generator=g, dtype=torch.float64) @ of.T).float(), (cost @ cost.T).float()
    rotation = torch.linalg.qr(torch.randn(size, size, generator=g))[0]
    turn = torch.stack((rotation, torch.zeros(size, size), rotation.T))
    plain = torch.stack((torch.eye(size), torch.zeros(size, size), torch.eye(size)))
    best, *others = (
        rounding_cost(x, cost, IN_BASIS[kind], basis, queries=False)
        for basis in (best_basis(x, cost, IN_BASIS[kind], queries=False), turn, plain)
    )
    assert best < 0.3 * min(others)
    # With too little added the feedback outgrows three bits.
    each = [basis_of(x.T @ x / len(x), cost, False, share) for share in SHARES]
    lost = [rounding_cost(x, cost, IN_BASIS[kind], basis, queries=False) for basis in each]
    assert best <= min(lost) * 1.01 and max(lost) > 1.5 * best


def test_heads_that_are_silent_or_cost_nothing_have_a_basis_too() -> None:
    none = torch.zeros(8, 8)
    for moment, cost in ((none, torch.eye(8)), (torch.eye(8), none), (none, none)):
        assert torch.isfinite(basis_of(moment, cost, queries=True)).all()
