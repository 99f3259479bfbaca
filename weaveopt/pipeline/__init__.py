"""The six steps, one function a file. They do not import one another; `weaveopt.backend` calls them in order."""
