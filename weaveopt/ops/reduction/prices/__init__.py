"""Times of a reduction's kernels, and the choice of the kernel for each token count."""
