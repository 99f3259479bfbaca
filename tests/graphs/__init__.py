"""Graphs, models, cases and values that tests share, and functions that capture, rewrite and run them."""
