"""Models, data and the ways to compute them that suites measure."""
