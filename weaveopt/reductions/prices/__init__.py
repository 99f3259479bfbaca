"""What the kernels of a reduction take, and which of them serves which token count."""
