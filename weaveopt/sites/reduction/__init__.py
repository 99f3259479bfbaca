"""Sites of the kind `reduction`."""
