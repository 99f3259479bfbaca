"""GEMM + reduce-scatter -> norm on this rank's rows -> all-gather + GEMMs, where a model all-reduces."""

from weaveopt.rewrites.shard_norm.rule import ShardNorm as ShardNorm
