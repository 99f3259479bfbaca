"""Computation of a mixture's experts, shared by the code that recognizes, prices and runs them."""
