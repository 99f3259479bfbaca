"""Local kernels timed at their shapes; and the option `verify`: the best candidates of a site run on the ranks themselves, and their times decide."""
