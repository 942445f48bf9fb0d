"""Triton kernels of batch-invariant numerics."""
