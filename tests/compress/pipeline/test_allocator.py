"""What is freed is used again within a block, and the system's behind it."""

import platform
import subprocess
import sys

import pytest

# Prints the pages that came anew from the system for eight arrays of 40 MB after two, and how many MB `release` gives
# back to it.
_CODE = """
import resource, sys
import torch
from compress.pipeline.allocator import keep_freed, release

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6

if sys.argv[1] == "kept":
    keep_freed()
for _ in range(2):
    torch.ones(10 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    torch.ones(10 << 20)
new, kept = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, held()
release()
print(new * resource.getpagesize() // (1 << 20), round(kept - held()))
"""


def _measured(how: str) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", _CODE, how], capture_output=True, text=True, check=True, timeout=300)
    new, given = map(int, done.stdout.split())
    return new, given


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_used_again_until_it_is_given_back() -> None:
    # Of 320 MB; where the first two came to lie on either side of something else, one array comes anew.
    new, given = _measured("kept")
    assert new < 100 and given > 25
    # As the library does it by itself.
    new, given = _measured("plain")
    assert new > 200 and given < 10
