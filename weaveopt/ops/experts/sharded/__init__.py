"""A mixture whose experts and tokens are both sharded, as one operation."""
