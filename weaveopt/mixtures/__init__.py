"""What the experts of a mixture compute, for all who recognize, price or run them."""
