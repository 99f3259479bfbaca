"""Sites of the kind `attention`."""
