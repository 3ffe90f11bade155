"""Kernels for GPUs, in Triton. Imported only where they run: `import runtime` needs no Triton."""
