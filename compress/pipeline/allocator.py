"""Memory of the C library's allocator, while blocks are worked on: kept within a block, given back behind it."""

import ctypes
from contextlib import suppress

# glibc's numbers for mallopt, and what it takes at the most: from how many bytes on memory is the system's again as
# soon as it is freed, and how much of it at the end of the heap.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_END, _KEPT_SIZES = 1 << 28, (1 << 26, 1 << 25)


def keep_freed() -> None:
    """Lets what is freed be used again: every window of a text asks for the same sizes.

    Pages that come anew from the system for each of them took up to a tenth of a block's time. To keep them takes
    0.05 GB beside 1.43 (a block of TinyLlama's shape). It holds for the process; systems without the function go on as
    before.
    """
    with suppress(OSError, AttributeError):  # another C library has no such function
        library = ctypes.CDLL(None)
        # Older ones take the smaller size only; without one they must go on adapting theirs.
        if any(library.mallopt(_MMAP_THRESHOLD, size) for size in _KEPT_SIZES):
            library.mallopt(_TRIM_THRESHOLD, _KEPT_END)


def release() -> None:
    """Gives memory that is free back to the system: the allocator would keep it in pieces between blocks.

    Blocks hold no reference cycles, so they are gone when their last name is; a garbage collection would take longer
    than a small block.
    """
    with suppress(OSError, AttributeError):  # another C library has no such function
        ctypes.CDLL(None).malloc_trim(0)
