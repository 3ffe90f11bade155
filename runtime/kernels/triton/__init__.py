"""Kernels for GPUs in Triton; where there is none, its interpreter runs the same ones, for tests.

Only `available` may be imported without Triton. The others are imported by whoever has chosen these kernels.
"""
