"""Reading and editing FX graphs: patterns, facts on nodes, Python floats that come as tensors, splicing."""
