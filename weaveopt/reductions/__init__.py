"""Sums of rows over ranks, then addition and norm: calls of those kernels, for every operation built on them."""
