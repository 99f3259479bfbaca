"""Norms, masks, quantized rows and GEMMs of linear layers, which several matchers read."""
