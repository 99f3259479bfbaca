"""GEMM -> reduce-scatter as one operation."""
