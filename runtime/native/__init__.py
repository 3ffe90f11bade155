"""The C++ kernels for CPUs: which instruction paths run here, and how fast the memory is."""

from runtime.native.binding import PATHS, bandwidth_reader, default_threads, usable

__all__ = ["PATHS", "bandwidth_reader", "default_threads", "usable"]
