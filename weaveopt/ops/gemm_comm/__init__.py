"""GEMMs and the collectives around them, which exchange rows while the GEMM still runs."""
