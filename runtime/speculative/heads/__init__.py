"""The networks of published draft heads, on the target's kernels."""
