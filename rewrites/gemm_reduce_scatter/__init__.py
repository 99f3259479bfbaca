"""GEMM -> reduce-scatter, in one operation on symmetric memory."""

from weaveopt.rewrites.gemm_reduce_scatter.rule import GemmReduceScatter as GemmReduceScatter
