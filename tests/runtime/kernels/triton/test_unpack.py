"""The PTX that unpacks words of codes, run instruction by instruction, against the codes that were packed."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from runtime.formats.nf4 import INT8_LEVELS
from runtime.kernels.reference import upper_codes
from runtime.kernels.triton.weight_layout import PER_BYTE

pytest.importorskip("triton")

from runtime.kernels.triton.unpack import LEFT, texts

_ALL = (1 << 32) - 1


def permuted(a: int, b: int, selector: int) -> int:
    """PTX's prmt: byte i is the one of b:a that nibble i of the selector says, or its sign where the nibble has one."""
    chosen = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = (b << 32 | a) >> 8 * (nibble & 7) & 255
        chosen |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return chosen


_OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b & _ALL,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permuted,
}


def run(ptx: str, *words: int) -> int:
    """The word that a text makes of its words."""
    held = {f"${i + 1}": word for i, word in enumerate(words)}
    for line in re.sub(r"^\{ \.reg [^;]*;|\}$", "", ptx).split(";"):
        if not line.strip():
            continue
        name, rest = line.strip().split(" ", 1)
        to, *operands = (part.strip() for part in rest.split(","))
        held[to] = _OPERATIONS[name](*(held[o] if o in held else int(o, 0) for o in operands))
    return held["$0"]


def word(codes: Tensor) -> int:
    """Four bytes as a word, the first the lowest."""
    return sum((int(code) & 255) << 8 * i for i, code in enumerate(codes))


# For each kind the codes of the parts of four bytes, and what they should come out as.
_MEANING: dict[str, tuple[int, int, Callable[[Tensor], Tensor]]] = {
    "int4": (-8, 8, lambda q: q << LEFT["int4"]),
    "uint4": (0, 16, lambda q: q),
    "ternary": (-1, 2, lambda q: q << LEFT["ternary"]),
    "nf4": (0, 16, lambda q: INT8_LEVELS[q.long()].to(torch.int64)),
    "planes": (-128, 128, lambda q: q),
    "upper": (-128, 128, lambda q: upper_codes(q.to(torch.int8)).to(torch.int64)),
}


@pytest.mark.parametrize("kind", _MEANING)
def test_words(kind: str) -> None:
    low, high, meaning = _MEANING[kind]
    parts = PER_BYTE["planes" if kind == "upper" else kind]
    bits = 8 // parts
    codes = torch.randint(low, high, (200, parts, 4), generator=torch.Generator().manual_seed(0))
    codes[0, :], codes[1, :] = low, high - 1
    places = torch.arange(parts).view(parts, 1)
    stored = codes >> 4 if high == 128 else codes
    upper = ((stored & (1 << bits) - 1) << bits * places).sum(1)
    lower = ((codes & 15) << bits * places).sum(1)
    if kind == "nf4":
        # Half a word has four codes of one part.
        upper = (stored.reshape(-1, 4, 2) << torch.tensor([0, 4])).sum(2)
    for number in range(len(codes)):
        words = [word(upper[number])] + [word(lower[number])] * (kind == "planes")
        for part, ptx in enumerate(texts(kind, parts)):
            assert run(ptx, *words) == word(meaning(codes[number, part])), (kind, part, number)


def test_whole_bytes_need_none() -> None:
    assert texts("int8", 1) == ()
