"""The `weaveopt` command: explain, doctor."""
