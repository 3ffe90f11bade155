"""The decoder on a GPU: memory that does not move, graphs of kernels, rounds with one wait for the device."""
