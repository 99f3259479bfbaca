"""The seams in Inductor, and what Inductor will run and what that takes."""
