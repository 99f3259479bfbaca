"""Candidates and rewrites of reduction sites that several rules share."""
