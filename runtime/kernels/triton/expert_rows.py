"""Which rows a program multiplies: adjacent ones; of a mixture those that the device sent to one expert.

A mixture's rows pick `count` experts each, which is count pairs of a row and an expert. Each pair has its programs; the
first row of a tile that picked an expert does the work for all rows of the tile that picked it, so that the expert is
read once, and the programs of the others' pairs end at once. Nothing of this is known to the host.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Picks:
    """experts (T, count) int64 on the device, contiguous: those of each row, all different; below 0: none."""

    experts: Tensor

    @property
    def rows(self) -> int:
        """T."""
        return self.experts.shape[0]

    @property
    def count(self) -> int:
        """Experts of a row."""
        return self.experts.shape[1]

    @property
    def pairs(self) -> int:
        """T · count: pair t · count + i is the i-th expert of row t."""
        return self.experts.numel()


@triton.jit
def rows_of(rows, picked, COUNT: tl.constexpr, PAIRED: tl.constexpr, BLOCK_T: tl.constexpr):
    """This program's rows of the inputs and of the outputs (BLOCK_T,), which of them there are, its expert, if any.

    picked  (rows, COUNT) experts of rows, or None: the rows are adjacent and there are no experts.
    PAIRED  the inputs have a row for each pair; else one for each row. The outputs have one for each pair.
    """
    if picked is None:
        t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
        from_row, to_row, there, expert, works = t, t, t < rows, 0, True
    else:
        pair = tl.program_id(0)
        expert = tl.load(picked + pair)
        own = pair // COUNT
        t = own // BLOCK_T * BLOCK_T + tl.arange(0, BLOCK_T)
        place = tl.full((BLOCK_T,), COUNT, tl.int32)
        for i in tl.static_range(COUNT):
            theirs = tl.load(picked + t * COUNT + i, mask=t < rows, other=-1)
            place = tl.where((theirs == expert) & (place == COUNT), i, place)
        first = tl.min(tl.where(place < COUNT, t, rows), axis=0)
        works = (expert >= 0) & (first == own)
        there = (place < COUNT) & works
        to_row = t * COUNT + place
        from_row = to_row if PAIRED else t
        # Programs without work read nothing, but the GPU looks at the addresses of their first asynchronous loads.
        expert = tl.maximum(expert, 0)
    return from_row, to_row, there, expert, works


@triton.jit(do_not_specialize=["rows"])
def add_experts_kernel(
    found, shares, picked, residual, out, rows, width,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out (rows, width) = residual + the experts' outputs found (rows · COUNT, width), each times its share.

    A row's experts are added in order of their number, to zero; then the residual is. Each product and sum is rounded.
    """
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    last = tl.full((), -1, tl.int64)
    for _ in tl.static_range(COUNT):
        # The expert of the next higher number, and where it stands.
        expert = tl.full((), 1 << 30, tl.int64)
        place = tl.full((), 0, tl.int64)
        for i in tl.static_range(COUNT):
            other = tl.load(picked + row * COUNT + i)
            nearer = (other > last) & (other < expert)
            expert = tl.where(nearer, other, expert)
            place = tl.where(nearer, row * COUNT + i, place)
        some = expert < (1 << 30)
        share = tl.load(shares + place, mask=some, other=0.0)
        total += tl.load(found + place * width + at, mask=inside & some, other=0.0) * share
        last = expert
    total += tl.load(residual + row * width + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, total, mask=inside)
