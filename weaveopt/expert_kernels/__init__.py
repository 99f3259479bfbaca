"""GPU kernels for operations on a mixture's experts: routing and GEMMs, their launch, and their calls."""
