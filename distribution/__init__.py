"""What is published: the source distribution and the wheels, and the check that they install."""
