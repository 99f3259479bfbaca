"""Measurements of the GEMMs and exchanges of a mixture's experts."""
