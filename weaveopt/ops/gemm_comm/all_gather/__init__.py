"""All-gather -> GEMMs as one operation."""
