"""The steps, one function a file, and `compilation`, which runs them. `weaveopt.backend` lists them in order."""
