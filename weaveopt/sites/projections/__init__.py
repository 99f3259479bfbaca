"""Sites of the kind `projections`."""
