"""Attention whose mask is known, or read as booleans, by the kernels that may take the place of what models call."""
