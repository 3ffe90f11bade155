"""Which device a name means, and what CUDA's failures mean: each one sentence."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from runtime.errors import UserError
from runtime.machine import cpu_share

if TYPE_CHECKING:
    import torch

_KINDS = ("cpu", "cuda")
_ASKED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]?i?B)")
_FREE = re.compile(r"of which ([\d.]+ [KMGT]?i?B) is free")


def resolve(device: str) -> "torch.device":
    """The device of "cpu", "cuda", "cuda:N" or "auto" (CUDA where there is one that works, else the CPU).

    Raises UserError for another name, and where CUDA was asked for and cannot be had: nothing falls back silently.
    """
    import torch

    if device == "auto":
        return torch.device("cpu" if why_no_cuda() else "cuda")
    kind, colon, index = device.partition(":")
    if kind not in _KINDS or (colon and (kind == "cpu" or not index.isdecimal())):
        raise UserError(f"expected cpu, cuda, cuda:N or auto, found {device!r}: correct the device")
    if kind == "cuda":
        why = why_no_cuda()
        if why:
            raise UserError(f"device {device!r} was asked for, but {why}; or run on cpu")
        count = torch.cuda.device_count()
        if index and int(index) >= count:
            raise UserError(f"device {device!r} was asked for, but there are {count} CUDA devices, numbered from 0")
    return torch.device(device)


def why_no_cuda() -> str:
    """Why CUDA cannot be used here, and what to do; empty where it can."""
    import torch

    if torch.version.cuda is None and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device: it is built without CUDA; install torch for CUDA"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    said = " ".join(str(one.message) for one in told)
    if "driver" in said and "too old" in said:
        return (
            f"torch {torch.__version__} needs a newer NVIDIA driver than this machine's (CUDA {torch.version.cuda});"
            " update the driver, or install a torch for an older CUDA"
        )
    return f"torch {torch.__version__} finds no CUDA device here; see what nvidia-smi says"


def explained(error: BaseException) -> UserError | None:
    """What an error of CUDA means, as a sentence; None for an error of another kind."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        asked, free = _ASKED.search(str(error)), _FREE.search(str(error))
        needed = f"{asked[1]} more were needed" if asked else "more was needed than there is"
        left = f", {free[1]} were free" if free else ""
        return UserError(
            f"the GPU is out of memory: {needed}{left}; take a scheme of fewer bits, fewer requests, a shorter context"
            " or a smaller kind of cache, or end what else runs there"
        )
    # torch's own class for these, where this torch has it; a plain RuntimeError in older ones.
    failure: type[BaseException] = getattr(torch, "AcceleratorError", RuntimeError)
    text = " ".join(str(error).split())
    if isinstance(error, failure | RuntimeError) and text.startswith(("CUDA error", "CUDA driver error")):
        what = text.split(":", 1)[1].split(" CUDA kernel errors")[0].split(" Search for")[0].strip().rstrip(".")
        return UserError(
            f"the GPU failed ({what}); it may have been taken away or reset: see what nvidia-smi says, and start again"
        )
    if isinstance(error, RuntimeError) and ("NVIDIA driver" in text or "CUDA driver version" in text):
        return UserError(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use this machine's NVIDIA driver; update the"
            " driver, or install a torch for an older CUDA"
        )
    return None


@contextmanager
def explaining() -> Iterator[None]:
    """Turns CUDA's errors into UserErrors of one sentence; others pass."""
    try:
        yield
    except Exception as error:
        meant = None if isinstance(error, UserError) else explained(error)
        if meant is None:
            raise
        raise meant from error


def keep_to_share() -> None:
    """Has torch compute on no more threads than a container's share of processors: by itself it counts the host's."""
    import torch

    share = cpu_share()
    if share is not None and torch.get_num_threads() > share:
        torch.set_num_threads(max(1, int(share)))


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Within, torch computes on so many threads (None: see `keep_to_share`); then on as many as before."""
    import torch

    before = torch.get_num_threads()
    if count is None:
        keep_to_share()
    else:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_threads(count: int) -> None:
    """Has torch compute on so many threads, in the whole process. Raises UserError for none, or more than 1,024."""
    import torch

    if not 1 <= count <= 1024:
        raise UserError(f"threads must be at least 1 and at most 1024, found {count}")
    torch.set_num_threads(count)
