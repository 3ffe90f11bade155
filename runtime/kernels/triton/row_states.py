"""How kernels go through the rows of a text whose layers carry a state: where each row's state is read and written.

A program takes one request, and a part of a layer's state that no other program touches. It goes through the request's
rows in their order, so that parents come first. A state that the next row reads stays in the program's registers; what
other rows read, or later forwards, lies in memory that cache/states.py owns.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

# In place of an address: the state before a row is that of the row above it.
CARRIED = 1
_CARRIED: tl.constexpr = tl.constexpr(CARRIED)


@dataclass(frozen=True, eq=False)
class Walk:
    """Where the T rows of a forward find the states of one token's layers, and leave their own.

    spans      (R, 2) int32: first row and number of rows of each request, 0 of none. Each row is in one span.
    addresses  (T, 2) int64: of the state before the row (0: all zeros; CARRIED), and where its own goes (0: nowhere).
    halves     they are float16, not float32: each row reads what the one before it left rounded.
    """

    spans: Tensor
    addresses: Tensor
    halves: bool = False


@triton.jit
def follows_another(before):
    """Whether the state at the address `before` must be read from memory: the row does not follow the one above."""
    return before != _CARRIED


@triton.jit
def read_state(before, place, at, inside, HALVES: tl.constexpr):
    """Floats place + at of the state at the address `before`; 0 where `inside` is false or there is no state.

    What the program wrote is there: rows of a tree read what earlier rows have left.
    """
    tl.debug_barrier()
    kind: tl.constexpr = tl.float16 if HALVES else tl.float32
    state = tl.load(before.to(tl.pointer_type(kind)) + place + at, mask=inside & (before != 0), other=0.0)
    # Nobody writes here before all have read.
    tl.debug_barrier()
    return state.to(tl.float32)


@triton.jit
def write_state(after, place, at, state, inside, HALVES: tl.constexpr):
    """Leaves floats place + at of a row's state at the address `after`, if it is one; what the next row reads."""
    kind: tl.constexpr = tl.float16 if HALVES else tl.float32
    left = state.to(kind)
    tl.store(after.to(tl.pointer_type(kind)) + place + at, left, mask=inside & (after != 0))
    return left.to(tl.float32)
