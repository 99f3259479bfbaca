"""GEMMs of one input as one call: `weave::merged_linear`, and how weights become adjacent in memory."""
