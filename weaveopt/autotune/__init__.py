"""Local kernels timed at their exact shapes; and, with the option `verify`, candidates timed on the ranks."""
