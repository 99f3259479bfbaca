"""`weave::gemm_all_reduce_norm`."""
