"""Measurements of the fused all-reduce + add + norm on GPUs and CPU ranks, alone and concurrently with a GEMM."""
