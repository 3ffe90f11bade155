"""States at the ends of pages, so that a text whose beginning is known goes on from there.

Pages hold keys and values alone; a layer that carries a state cannot go on from them. So the state of all layers after
a page's last token is kept beside the page: where pieces of prompts end, where texts were seen to part, and of a text
that is being written at its last full page. Few are kept, for one may be tens of megabytes: the one that was used the
longest ago goes first, and each goes with what its page holds.
"""

from collections import OrderedDict

import torch
from torch import Tensor

# Bytes that those of a cache take together, and how many there may be however large one is.
_BYTES, _LEAST = 1 << 28, 4


def most_snapshots(size: int) -> int:
    """How many a cache keeps of states of so many bytes."""
    return max(_LEAST, _BYTES // max(1, size))


def bytes_of_snapshots(floats: int) -> int:
    """What those of a cache of float32 take at most, of states of so many floats."""
    return most_snapshots(4 * floats) * 4 * floats


class Snapshots:
    """By page, the state (floats,) after its last token; each is `size` bytes."""

    def __init__(self, size: int):
        self._most = most_snapshots(size)
        self._kept: OrderedDict[int, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, page: int) -> bool:
        return page in self._kept

    # Outside of forwards, too, where what was made inside one may not be written.
    @torch.inference_mode(False)
    def add(self, page: int, state: Tensor) -> None:
        """Keeps a copy of the state after a page, for which the oldest may have to go."""
        # The memory of one that goes, where there is one: a new one may be much to ask for.
        room = self._kept.popitem(last=False)[1] if len(self._kept) >= self._most else state.new_empty(state.shape)
        self._kept[page] = room.copy_(state)

    def use(self, page: int) -> Tensor:
        """The state after a page that has one."""
        self._kept.move_to_end(page)
        return self._kept[page]

    def drop(self, page: int) -> None:
        """What the page holds is no longer what it held."""
        self._kept.pop(page, None)

    def move(self, source: int, target: int) -> None:
        """The page `target` holds the same as `source`, and is the one that texts will find."""
        if source in self._kept and target not in self._kept:
            self._kept[target] = self._kept.pop(source)
