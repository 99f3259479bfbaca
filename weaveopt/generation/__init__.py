"""`model.generate(..., custom_generate=weaveopt.generate)`: one captured step, launched ahead of the host."""
