"""Measurements of GEMMs that overlap with the exchange of their rows."""
