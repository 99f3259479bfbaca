"""GEMMs of one input as one call: `weave::merged_linear`, and how weights come to lie one after the other."""
