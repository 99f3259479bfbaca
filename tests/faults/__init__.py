"""Faults: every way in which a rank can fail its group, what every rank says, and what remains."""
