"""Emulation for tests: device code on CPUs, hosts on one machine, Triton without a GPU, and made-up machines."""
