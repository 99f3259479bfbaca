"""Libraries that models come from, one folder each."""
