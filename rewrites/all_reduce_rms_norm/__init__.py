"""GEMM -> all-reduce -> (+ residual) -> norm, in one operation on symmetric memory."""

from weaveopt.rewrites.all_reduce_rms_norm.rule import AllReduceRMSNorm as AllReduceRMSNorm
