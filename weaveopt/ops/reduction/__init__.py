"""Sums of rows over ranks, then addition and norm: `weave::all_reduce_norm`, and what operations built on it share."""
