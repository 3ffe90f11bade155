"""The operations of a decoder: reference.py says what they mean, dispatch.py which implementation runs, and why."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.kernels.dispatch import Kernel


def available(device: str = "cpu", threads: int | None = None) -> "list[Kernel]":
    """What could run on a device, and why or why not; `auto` takes the first that is usable."""
    # Imported when asked: this package is on the way to reference.py, which dispatch imports.
    from runtime.kernels import dispatch

    return dispatch.available(device, threads)


__all__ = ["available"]
