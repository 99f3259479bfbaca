"""Attention without a mask tensor, by the kernels that torch ships."""
