"""All-gather -> GEMMs, in one operation on symmetric memory."""

from weaveopt.rewrites.all_gather_gemm.rule import AllGatherGemm as AllGatherGemm
