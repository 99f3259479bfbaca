"""GEMM -> all-reduce -> (+ residual) -> norm, in which rows are exchanged while the GEMM makes others."""

from weaveopt.rewrites.gemm_all_reduce.rule import GemmAllReduce as GemmAllReduce
