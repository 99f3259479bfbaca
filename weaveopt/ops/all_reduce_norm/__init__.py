"""`weave::all_reduce_norm`, `mm_all_reduce_norm` and `all_reduce_norm_quant`."""
