"""A mixture whose experts and tokens are both sharded, as graphs hold it: its call, and its library forms."""
