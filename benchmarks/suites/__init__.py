"""Suites: each module declares `SUITES`, and is found by being here."""
