"""Orders in which codes, scales and zero points are mistakenly written or read, each with its words."""

from collections.abc import Callable

import torch
from torch import Tensor

# Columns of a word's eight as AWQ's layout interleaves them.
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def _pairs(codes: Tensor) -> Tensor:
    return codes.unflatten(1, (-1, 2)).flip(2).flatten(1) if codes.shape[1] % 2 == 0 else codes


def swapped_rows(codes: Tensor) -> Tensor:
    return codes.unflatten(0, (-1, 2)).flip(1).flatten(0, 1) if codes.shape[0] % 2 == 0 else codes


def _by_eights(order: tuple[int, ...], dim: int) -> Callable[[Tensor], Tensor]:
    def change(codes: Tensor) -> Tensor:
        if codes.shape[dim] % len(order):
            return codes
        pieces = codes.unflatten(dim, (-1, len(order)))
        return pieces.index_select(dim + 1, torch.tensor(order)).flatten(dim, dim + 1)

    return change


def _halves(size: int) -> Callable[[Tensor], Tensor]:
    order = (*range(size // 2, size), *range(size // 2))
    return _by_eights(order, 1)


_INVERSE = tuple(sorted(range(8), key=lambda place: _AWQ[place]))
INTERLEAVED: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("in AWQ's order of eight", _by_eights(_AWQ, 0)),
    ("out of AWQ's order of eight", _by_eights(_INVERSE, 0)),
    ("from the other end of a word", _by_eights(tuple(range(7, -1, -1)), 0)),
    ("with AWQ's nibbles swapped", _by_eights((2, 3, 0, 1, 6, 7, 4, 5), 0)),
]
ORDERS_OF_CODES: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("the nibbles of each byte are swapped (along the inputs)", _pairs),
    ("the nibbles of each byte are swapped (along the outputs)", swapped_rows),
    ("the halves of each block of 32 are swapped: its nibbles are", _halves(32)),
    ("the halves of each block of 64 are swapped: its nibbles are", _halves(64)),
    ("the inputs of a word are read from its other end", _by_eights(tuple(range(7, -1, -1)), 1)),
    ("the bytes of a word are turned round", _by_eights((6, 7, 4, 5, 2, 3, 0, 1), 1)),
    *((f"the outputs are taken {says}", change) for says, change in INTERLEAVED),
]
ORDERS_OF_GROUPS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("transposed", lambda s: s.t().reshape(s.shape)),
    ("transposed the other way", lambda s: s.reshape(s.shape[1], s.shape[0]).t()),
    ("in the other order of groups", lambda s: s.flip(1)),
    ("in the other order of rows", lambda s: s.flip(0)),
    ("one group earlier", lambda s: s.roll(1, 1)),
    ("one group later", lambda s: s.roll(-1, 1)),
    ("one row earlier", lambda s: s.roll(1, 0)),
    ("one row later", lambda s: s.roll(-1, 0)),
    ("inverted", lambda s: 1 / s),
]
