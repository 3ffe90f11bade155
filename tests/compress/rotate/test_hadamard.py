"""Hadamard matrices of all known sizes, and that rotations by them are orthogonal and undone."""

import pytest
import torch

from compress.rotate.hadamard import Rotation, hadamard, orders

CONSTRUCTIONS = {"Sylvester": 32, "Paley": 20, "Paley, doubled": 28, "doubled": 36, "Williamson": 52}


@pytest.mark.parametrize("order", CONSTRUCTIONS.values(), ids=list(CONSTRUCTIONS))
def test_a_construction_gives_a_hadamard_matrix(order: int) -> None:
    found = hadamard(order)
    assert found is not None and found.shape == (order, order)
    assert bool((found.abs() == 1).all())
    assert torch.equal(found @ found.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [3, 6, 18, 92, 116])
def test_sizes_that_no_construction_has_are_known_as_such(order: int) -> None:
    assert hadamard(order) is None


@pytest.mark.parametrize("size", [64, 80, 96, 576, 896, 960, 1152, 1536, 2880, 3584, 5120, 6656])
def test_hidden_sizes_of_language_models_are_products(size: int) -> None:
    found = orders(size)
    assert found is not None
    assert torch.tensor(found).prod() == size and all(hadamard(order) is not None for order in found)


@pytest.mark.parametrize("size", [1, 2, 48, 56, 240, 448])
def test_a_rotation_is_flat_orthogonal_and_undone(size: int) -> None:
    rotation = Rotation(size, seed=3)
    eye = torch.eye(size, dtype=torch.float64)
    q = rotation.turn(eye).T  # columns are turned units
    torch.testing.assert_close(q.abs(), torch.full_like(q, size**-0.5))
    torch.testing.assert_close(q @ q.T, eye)
    x = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(rotation.turn(x), x @ q.T)
    torch.testing.assert_close(rotation.back(rotation.turn(x)), x)


def test_the_seed_draws_the_signs() -> None:
    x = torch.ones(64)
    assert torch.equal(Rotation(64, 1).turn(x), Rotation(64, 1).turn(x))
    assert not torch.equal(Rotation(64, 1).turn(x), Rotation(64, 2).turn(x))


def test_a_size_that_is_no_product_is_refused() -> None:
    with pytest.raises(ValueError, match="no Hadamard matrix of 46 rows"):
        Rotation(46, 0)
