"""Hadamard matrices of many sizes, made by construction, and the rotations that follow from them.

A Hadamard matrix is of ±1 with H Hᵀ = n I; the Kronecker product of two of them is one, too. Sylvester's are powers of
two; Paley's (1933) come from the squares modulo a prime, of sizes q + 1 and 2 (q + 1); Williamson's (1944) are four
symmetric circulant blocks, found by search. Products of those cover the sizes that language models have.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations_with_replacement

import torch
from torch import Tensor

# The largest factor that is one power of two: products with matrices of this size are quick.
_SYLVESTER = 64
# The largest size of one construction, and the largest block of Williamson's: the search takes 2 to half of it.
_LARGEST, _WILLIAMSON = 512, 15


def orders(size: int) -> tuple[int, ...] | None:
    """Sizes of known matrices whose product is `size`, the smallest that is no power of two first; None: none known."""
    if size < 1:
        return None
    if size & (size - 1) == 0:
        count, rest = divmod(size.bit_length() - 1, _SYLVESTER.bit_length() - 1)
        return (_SYLVESTER,) * count + ((1 << rest,) if rest else ())
    for order in range(12, min(size, _LARGEST) + 1, 4):
        if size % order == 0 and order & (order - 1) and hadamard(order) is not None:
            rest_of = orders(size // order)
            if rest_of is not None:
                return (order, *rest_of)
    return None


@cache
def hadamard(order: int) -> Tensor | None:
    """(order, order) float64 of ±1 by one construction; None where none of them has this size."""
    if order & (order - 1) == 0:
        return _sylvester(order)
    if order % 4:
        return None
    if _is_prime(order - 1):
        return _paley(order - 1)
    half = order // 2 - 1
    if _is_prime(half) and half % 4 == 1:
        return _paley_double(half)
    return _williamson(order // 4)


def _sylvester(order: int) -> Tensor:
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < order:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _squares(q: int) -> Tensor:
    """(q + 1, q + 1): a border of ones around χ(i − j), which is 1 for squares modulo q, −1 for others, 0 for 0."""
    signs = torch.full((q,), -1.0, dtype=torch.float64)
    signs[torch.arange(1, q) ** 2 % q] = 1.0
    signs[0] = 0.0
    places = torch.arange(q)
    found = torch.ones(q + 1, q + 1, dtype=torch.float64)
    found[1:, 1:] = signs[(places.unsqueeze(1) - places) % q]
    found[0, 0] = 0.0
    return found


def _paley(q: int) -> Tensor:
    """Of size q + 1, q a prime that leaves 3 when divided by 4: the border's one side is turned over."""
    found = _squares(q)
    found[1:, 0] = -1.0
    return found + torch.eye(q + 1, dtype=torch.float64)


def _paley_double(q: int) -> Tensor:
    """Of size 2 (q + 1), q a prime that leaves 1 when divided by 4."""
    off = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    on = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(_squares(q), off) + torch.kron(torch.eye(q + 1, dtype=torch.float64), on)


def _williamson(size: int) -> Tensor | None:
    """Of four circulant blocks (size, size), whose squares must sum to 4 · size · I; None where the search finds none.

    Circulant matrices share their eigenvectors, so it is enough that the eigenvalues' squares sum to 4 · size.
    """
    if size % 2 == 0 or size > _WILLIAMSON:
        return None
    half = size // 2
    bits = torch.arange(1 << half).unsqueeze(1) >> torch.arange(half) & 1
    side = 1.0 - 2.0 * bits.double()
    rows = torch.cat((torch.ones(len(side), 1, dtype=torch.float64), side, side.flip(1)), 1)
    squares = torch.fft.rfft(rows).real.square()

    def key(values: Tensor) -> tuple[int, ...]:
        return tuple((values * 1e4).round().long().tolist())

    pairs = list(combinations_with_replacement(range(len(rows)), 2))
    known = {key(squares[a] + squares[b]): (a, b) for a, b in pairs}
    for a, b in pairs:
        other = known.get(key(4 * size - squares[a] - squares[b]))
        if other is not None:
            places = (torch.arange(size) - torch.arange(size).unsqueeze(1)) % size
            w, x, y, z = (rows[number][places] for number in (a, b, *other))
            lines = ((w, x, y, z), (-x, w, -z, y), (-y, z, w, -x), (-z, -y, x, w))
            return torch.cat([torch.cat(line, 1) for line in lines])
    return None


@dataclass(frozen=True)
class Rotation:
    """A Hadamard matrix of a product of sizes behind random signs, over the root of its size: Q = H · diag(signs) / √n.

    size  of which `orders` knows a product. Raises ValueError for another.
    seed  of the signs.
    """

    size: int
    seed: int

    def __post_init__(self) -> None:
        if orders(self.size) is None:
            raise ValueError(f"no Hadamard matrix of {self.size} rows is known here")

    @cached_property
    def signs(self) -> Tensor:
        """(size,) float64 of ±1."""
        generator = torch.Generator().manual_seed(self.seed)
        return 1.0 - 2.0 * torch.randint(0, 2, (self.size,), generator=generator).double()

    def turn(self, x: Tensor) -> Tensor:
        """x (…, size) with every row r as Q r; float64."""
        return self._product(x.double() * self.signs, transposed=False)

    def back(self, x: Tensor) -> Tensor:
        """What `turn` was given; float64."""
        return self._product(x.double(), transposed=True) * self.signs

    def _product(self, x: Tensor, transposed: bool) -> Tensor:
        """One factor of the Kronecker product after the other: along the index's last digit, which then goes first."""
        out = x.reshape(-1, self.size)
        for order in reversed(orders(self.size) or ()):
            factor = hadamard(order)
            assert factor is not None
            digits = out.reshape(-1, order) @ (factor if transposed else factor.T)
            out = digits.view(len(out), -1, order).transpose(1, 2).reshape(len(out), self.size)
        return out.reshape(x.shape) / math.sqrt(self.size)
