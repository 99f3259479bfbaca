"""Published files: the source distribution and the wheels, and the check that they install."""
