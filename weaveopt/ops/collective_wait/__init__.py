"""`weave::collective_wait`, and its placement in a graph."""
