"""Kernels in Triton, one module for each; they need a GPU and are used on request only."""
