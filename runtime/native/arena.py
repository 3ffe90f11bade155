"""Memory for weights: in large pages where the system has them, which spares the processor most of its page walks."""

import contextlib
import mmap

import torch
from torch import Tensor

_PAGE = 1 << 21
_CHUNK = 64 << 20


class Arena:
    """Hands out pieces of large anonymous mappings. A mapping goes back when the last tensor on it does."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0

    def allocate(self, size: int) -> Tensor:
        """(size,) uint8 on a 64-byte boundary, zeros."""
        size = -(-size // 64) * 64
        if size >= _CHUNK // 2:
            return large(size)
        if self._chunk is None or self._used + size > len(self._chunk):
            self._chunk, self._used = large(_CHUNK), 0
        piece = self._chunk[self._used : self._used + size]
        self._used += size
        return piece


def large(size: int) -> Tensor:
    """(size,) uint8, zeros, from the start of a large page. What is never touched takes no memory."""
    # Private: shared memory, mmap's default, gets no large pages as most systems are set.
    kind = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size + _PAGE, **kind)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A system without large pages refuses: the small ones work as well, a little slower.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _PAGE
    return whole[start : start + size]
