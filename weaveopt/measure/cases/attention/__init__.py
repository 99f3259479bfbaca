"""Measurements of attention: the kernels that models call, and those that take their place."""
