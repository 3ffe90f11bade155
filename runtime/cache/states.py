"""The states of a request whose layers carry one from row to row: one after each of its last tokens.

A row reads the state after its parent and leaves its own, so to roll back, in a chain or in a tree, is only to say
which token is the last. As many are kept as a request's drafts have needed so far: of a prompt the last ones, for a
state may be megabytes. What is rolled back further than states are kept is computed again from the text, to the same
bits (`States.holds`, BaseDecoder): states are a cache of what the tokens imply.

States in float16 and int8 are rounded where a row leaves its own, so every row reads rounded ones, also within one
forward. A state beyond ±65504 of float16 is an infinity, which no logits survive unseen. In int8 the rows of matrices
have a scale each, of their largest magnitude; a convolution's last inputs stay float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.checkpoints.record import StateShape
from runtime.errors import UserError
from runtime.kernels.reference import quantize_rows
from runtime.kv_store import zeros

# States that a request begins with: small ones as a short draft needs them, large ones as a token without any.
_FIRST, _LEAST = 8, 2
# Elements from which on a state is large: a megabyte of floats.
_LARGE = 1 << 18
# Those of the longest draft that can be asked for, and of the longest that is chosen where none was asked for.
MOST, _CHOSEN = 65, 17
# In the order of native/kernels.h, StateKind.
_KINDS = (torch.float32, torch.float16, torch.int8)
# Drafts of a request whose tokens are left on a device before they are read.
_MOST_UNREAD = 64


def bytes_of_states(floats: int) -> int:
    """What a request's come to take whose layers have so many floats of a state; a wide tree takes more."""
    return 4 * _CHOSEN * floats


class States:
    """One request's: `memory` (held, width) float32, float16 or int8, the state after slot s at s modulo `held`.

    shapes  of each layer's state, which lie one behind the other; int8, of which `width` are bytes, needs them.

    Raises UserError where the machine has no memory for more of them.
    """

    def __init__(
        self,
        width: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        shapes: Sequence[StateShape] = (),
    ):
        self.memory = _allocate(_LEAST if width >= _LARGE else _FIRST, width, device, dtype)
        self._shapes = shapes
        self.tokens: list[int] = []  # in order of their slots
        self._oldest = 0  # the first slot whose state is still there
        self._end = 0  # behind the last slot that a forward took
        # Tokens that are not among `tokens` yet: their first slot, and they, on any device.
        self._unread: list[tuple[int, Tensor]] = []

    @property
    def pointers(self) -> tuple[int, int, int, int]:
        """Address, how many are held, width of one, and what they are held in (native/kernels.h, StateKind)."""
        held, width = self.memory.shape
        return self.memory.data_ptr(), held, width, _KINDS.index(self.memory.dtype)

    def holds(self, length: int) -> bool:
        """Whether the state after the first `length` tokens is there; before the first it is all zeros."""
        return length == 0 or length - 1 >= self._oldest

    def extend(self, tokens: Sequence[int], wanted: int) -> None:
        """Makes room for the states after further slots, in which these tokens are; the last `wanted` will be held."""
        self._oldest = min(self._oldest, len(self.tokens))  # of a text that begins anew
        self._grow(wanted)
        self.tokens += tokens
        self._end = len(self.tokens)
        self._oldest = max(self._oldest, self._end - len(self.memory))

    def resume(self, tokens: Sequence[int], state: Tensor) -> None:
        """Of a new request: what it would hold after these tokens, given the state after the last of them."""
        self.tokens, self._end = [*tokens], len(tokens)
        self._oldest = self._end - 1
        self.place(self._oldest).copy_(state)

    def learn(self, first: int, tokens: Tensor) -> None:
        """Which tokens (n,) the slots from `first` on hold. They are read when they are needed, or are too many: only
        then this waits for the device on which they lie."""
        self._unread.append((first, tokens))
        if len(self._unread) > _MOST_UNREAD:
            self._read()

    def restart(self) -> None:
        """None is there any more: all are about to be computed again, of one token after the other."""
        self._read()
        self._oldest = len(self.tokens)
        # A draft that was fed token by token: the next one may be longer. What goes further back was none.
        if (lost := self._end - self._oldest + 1) <= MOST:
            self._grow(min(max(lost, 2 * len(self.memory)), MOST))

    def restarted(self) -> None:
        """They have been computed."""
        self._oldest = max(0, len(self.tokens) - len(self.memory))

    def truncate(self, length: int) -> None:
        """Forgets what follows the first `length` tokens."""
        del self.tokens[length:]
        self._unread = [(first, part[: length - first]) for first, part in self._unread if first < length]

    def keep(self, length: int, path: Sequence[int]) -> None:
        """Moves the slots length + path[i] together behind the first `length`, and forgets the others."""
        self._read()
        held, moves = len(self.memory), [pair for pair in enumerate(path) if pair[0] != pair[1]]
        if any(length + min(pair) < self._oldest for pair in moves):
            self._oldest = len(self.tokens)
        moved = self.memory[[(length + step) % held for step in path]]
        self.memory[[(length + place) % held for place in range(len(path))]] = moved
        self.tokens[length:] = [self.tokens[length + step] for step in path]

    def copy(self) -> "States":
        """The same for a request that goes its own way from here."""
        other = States(0, self.memory.device, shapes=self._shapes)
        other.memory = _allocate(len(self.memory), self.memory.shape[1], self.memory.device, self.memory.dtype)
        other.memory.copy_(self.memory)
        other.tokens, other._oldest, other._end = [*self.tokens], self._oldest, self._end
        other._unread = [*self._unread]
        return other

    def place(self, slot: int) -> Tensor:
        """The state after a slot, to be read or written."""
        return self.memory[slot % len(self.memory)]

    def load(self, slot: int, place: int, size: int) -> Tensor:
        """After a slot (below 0: before all, zeros), the state of the layer whose floats are `size` from `place` on."""
        if slot < 0:
            return torch.zeros(size, device=self.memory.device)
        if self.memory.dtype is not torch.int8:
            return self.place(slot)[place : place + size].float()
        at, shape = self._packed(place, size)
        held = self.place(slot)[at : at + shape.bytes]
        inputs, end = held[: 4 * shape.inputs].view(torch.float32), 4 * shape.inputs + shape.rows * (4 + shape.columns)
        rows = held[4 * shape.inputs : end].view(shape.rows, 4 + shape.columns)
        scale = rows[:, :4].contiguous().view(torch.float32)
        return torch.cat((inputs, (rows[:, 4:].float() * scale).flatten()))

    def save(self, slot: int, place: int, values: Tensor) -> None:
        """Rounds a layer's state (size,) and writes it to a slot; as `load` reads it."""
        if self.memory.dtype is not torch.int8:
            self.place(slot)[place : place + len(values)] = values
            return
        at, shape = self._packed(place, len(values))
        made = values[: shape.inputs].contiguous().view(torch.int8)
        if shape.rows:
            codes, scale = quantize_rows(values[shape.inputs :].view(shape.rows, shape.columns))
            made = torch.cat((made, torch.cat((scale.unsqueeze(1).view(torch.int8), codes), dim=1).flatten()))
        self.place(slot)[at : at + len(made)] = made

    def _packed(self, place: int, size: int) -> tuple[int, StateShape]:
        """Where in int8 the state of a layer begins, and its shape."""
        at = floats = 0
        for shape in self._shapes:
            if floats == place and shape.floats == size:
                return at, shape
            at, floats = at + shape.bytes, floats + shape.floats
        raise ValueError(f"no layer's state is {size} floats from {place} on")

    def _read(self) -> None:
        found = torch.cat([part for _, part in self._unread]).tolist() if self._unread else []
        for first, part in self._unread:
            self.tokens[first : first + len(part)] = found[: len(part)]
            del found[: len(part)]
        self._unread = []

    def _grow(self, held: int) -> None:
        old = self.memory
        if held <= len(old):
            return
        self.memory = _allocate(held, old.shape[1], old.device, old.dtype)
        slots = torch.arange(self._oldest, len(self.tokens))
        self.memory[slots % held] = old[slots % len(old)]


# States are moved outside of forwards, too, where what was made inside one may not be written.
@torch.inference_mode(False)
def _allocate(held: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    try:
        return zeros((held, width), dtype, device)
    except (RuntimeError, MemoryError) as error:
        size = 1e-9 * dtype.itemsize * held * width
        raise UserError(
            f"{held} states of a request, {size:.1f} GB, do not fit this machine's memory; take fewer"
            " requests or shorter drafts"
        ) from error
