"""Measures a machine for its profile: what `weaveopt calibrate` runs, on the ranks of one host.

Ranks run the same steps in the same order. A time is a median; of a step that all ranks take part in, the slowest
rank's. What comes out is the same on every rank.
"""
