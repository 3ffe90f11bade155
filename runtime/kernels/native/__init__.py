"""The C++ kernels for CPUs: which instruction paths run here, and how fast the memory is."""

from runtime.kernels.native.binding import PATHS, default_threads, read_bandwidth, usable

__all__ = ["PATHS", "default_threads", "read_bandwidth", "usable"]
