"""The states of a request whose layers carry one from row to row: one after each of its last tokens.

A row reads the state after its parent and leaves its own, so to roll back, in a chain or in a tree, is only to say
which token is the last. What is rolled back further than states are kept is computed again from the text, to the same
bits (`States.holds`, BaseDecoder): states are a cache of what the tokens imply.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.kv_store import zeros

# States that a request begins with, and how many a chain makes it keep at most: drafts are shorter, as a rule, and
# prompts longer. Where it was rolled back further, as after drafts of 64 tokens, it keeps more from then on.
_FIRST, _MOST, _ROLLED_BACK = 8, 32, 128


def bytes_of_states(floats: int) -> int:
    """What a request's come to take whose layers have so many floats of a state; long drafts and trees take more."""
    return 4 * _MOST * floats


class States:
    """One request's: `memory` (held, floats) float32, the state after slot s at s modulo `held`."""

    def __init__(self, floats: int, device: torch.device):
        self.memory = _allocate(_FIRST, floats, device)
        self.tokens: list[int] = []  # in order of their slots
        self._oldest = 0  # the first slot whose state is still there

    @property
    def pointers(self) -> tuple[int, int, int]:
        """Address, how many are held, and floats of one."""
        held, floats = self.memory.shape
        return self.memory.data_ptr(), held, floats

    def holds(self, length: int) -> bool:
        """Whether the state after the first `length` tokens is there; before the first it is all zeros."""
        return length == 0 or length - 1 >= self._oldest

    def extend(self, tokens: Sequence[int], tree: bool) -> None:
        """Makes room for the states after further slots, in which these tokens are: a chain, or a tree."""
        self._oldest = min(self._oldest, len(self.tokens))  # of a text that begins anew
        count = len(tokens) + 1  # the state that all of them begin from stays
        self._grow(count if tree else min(count, _MOST))
        self.tokens += tokens
        self._oldest = max(self._oldest, len(self.tokens) - len(self.memory))

    def learn(self, tokens: Sequence[int]) -> None:
        """Which tokens the last slots hold."""
        self.tokens[len(self.tokens) - len(tokens) :] = tokens

    def restart(self) -> None:
        """None is there any more: all are about to be computed again, of one token after the other."""
        self._oldest = len(self.tokens)
        # That it went this far back was not foreseen: the next time it may be.
        self._grow(min(2 * len(self.memory), _ROLLED_BACK))

    def restarted(self) -> None:
        """They have been computed."""
        self._oldest = max(0, len(self.tokens) - len(self.memory))

    def truncate(self, length: int) -> None:
        """Forgets what follows the first `length` tokens."""
        del self.tokens[length:]

    def keep(self, length: int, path: Sequence[int]) -> None:
        """Moves the slots length + path[i] together behind the first `length`, and forgets the others."""
        held, moves = len(self.memory), [pair for pair in enumerate(path) if pair[0] != pair[1]]
        if any(length + min(pair) < self._oldest for pair in moves):
            self._oldest = len(self.tokens)
        moved = self.memory[[(length + step) % held for step in path]]
        self.memory[[(length + place) % held for place in range(len(path))]] = moved
        self.tokens[length:] = [self.tokens[length + step] for step in path]

    def copy(self) -> "States":
        """The same for a request that goes its own way from here."""
        other = States(0, self.memory.device)
        other.memory = _allocate(len(self.memory), self.memory.shape[1], self.memory.device)
        other.memory.copy_(self.memory)
        other.tokens, other._oldest = [*self.tokens], self._oldest
        return other

    def place(self, slot: int) -> Tensor:
        """The state after a slot, to be read or written."""
        return self.memory[slot % len(self.memory)]

    def _grow(self, held: int) -> None:
        old = self.memory
        if held <= len(old):
            return
        self.memory = _allocate(held, old.shape[1], old.device)
        slots = torch.arange(self._oldest, len(self.tokens))
        self.memory[slots % held] = old[slots % len(old)]


# States are moved outside of forwards, too, where what was made inside one may not be written.
@torch.inference_mode(False)
def _allocate(held: int, floats: int, device: torch.device) -> Tensor:
    return zeros((held, floats), torch.float32, device)
