"""Attention: kernels that read a mask and only the keys that it admits, and those that torch ships without one."""
