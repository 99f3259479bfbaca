"""The fused all-reduce + add + norm on the fabrics of GPUs and of CPU ranks, and beside a GEMM."""
