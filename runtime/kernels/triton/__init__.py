"""Whether these kernels can run, and why not. Nothing here imports Triton unless its interpreter may be on."""

import os
import sys
from importlib.util import find_spec

import torch

# int8 products on tensor cores, bfloat16 and asynchronous copies: Ampere and later.
LEAST_CAPABILITY = (8, 0)


def usable(device: str) -> tuple[bool, str]:
    """Whether Triton's kernels run on a device ("cpu", "cuda", "cuda:1"), and why or why not, as one clause."""
    if find_spec("triton") is None:
        return False, "Triton is not installed (pip install 'specpress[gpu]')"
    if not device.startswith("cuda"):
        if device == "cpu" and interpreted():
            return True, "Triton's interpreter is on: slow, for tests"
        return False, "Triton's kernels run on CUDA"
    if not torch.cuda.is_available():
        return False, "this torch finds no CUDA device that its driver can use"
    where = torch.device(device)
    if where.index is not None and where.index >= torch.cuda.device_count():
        return False, f"there is no {device}; torch finds {torch.cuda.device_count()} CUDA devices"
    found = torch.cuda.get_device_capability(where)
    name = torch.cuda.get_device_name(where)
    if found < LEAST_CAPABILITY:
        wanted = ".".join(map(str, LEAST_CAPABILITY))
        return False, f"{name} has compute capability {found[0]}.{found[1]}, and the kernels need {wanted}"
    if interpreted():
        return True, f"{name}, but Triton's interpreter is on: slow, for tests"
    return True, f"{name}, compute capability {found[0]}.{found[1]}"


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU instead of compiling them: its own switch, as it stands now.

    Nobody can have turned it on without either of the two that are looked at first, and Triton takes half a second to
    import.
    """
    if "triton" not in sys.modules and "TRITON_INTERPRET" not in os.environ:
        return False
    if find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)
