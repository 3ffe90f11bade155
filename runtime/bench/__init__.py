"""`python -m runtime.bench`: how fast kernels, forwards, speculation and a loaded engine are on this machine."""
