"""The memory of weights: aligned, zero, and of a kind that the system gives large pages."""

import sys
from pathlib import Path

import pytest
import torch

from runtime.native.arena import Arena, large


def _mapping(address: int) -> tuple[str, list[str]]:
    """Permissions and flags of the mapping that an address lies in, as Linux lists them."""
    inside, permissions = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside, permissions = low <= address < high, line.split()[1]
        elif inside and first == "VmFlags:":
            return permissions, line.split()[1:]
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps is Linux's")
def test_the_system_may_back_weights_with_large_pages() -> None:
    """Shared anonymous memory gets none unless shmem_enabled says so: the mapping must be private, and advised."""
    piece = large(8 << 20)
    piece.fill_(1)
    permissions, flags = _mapping(piece.data_ptr())
    assert permissions == "rw-p"
    if Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        assert "hg" in flags
        plain = torch.ones(8 << 18)
        assert "hg" not in _mapping(plain.data_ptr())[1]


def test_pieces_are_aligned_zero_and_apart() -> None:
    arena = Arena()
    pieces = [arena.allocate(size) for size in (1, 63, 64, 4097, 33 << 20, 20 << 20, 20 << 20, 40 << 20)]
    for number, piece in enumerate(pieces, start=1):
        assert piece.data_ptr() % 64 == 0 and len(piece) % 64 == 0
        assert not piece[:: 1 << 12].any() and not piece[-1]
        piece[:: 1 << 12] = number
        piece[-1] = number
    for number, piece in enumerate(pieces, start=1):
        assert (piece[:: 1 << 12] == number).all() and piece[-1] == number
