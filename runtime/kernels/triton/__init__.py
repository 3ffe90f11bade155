"""Kernels for GPUs, in Triton. Import it only where Triton is wanted: `import runtime` must not."""
