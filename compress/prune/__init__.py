"""Pruning: which weights, heads, channels or blocks go, and what the ones that stay become."""
