"""What operations on a mixture's experts run on GPUs: routing and GEMMs, how they are launched, and their calls."""
