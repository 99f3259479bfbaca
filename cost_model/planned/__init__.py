"""Arithmetic of rules that are planned and not written yet: tested, called by nothing, not exported.

A module leaves this folder when the rule that needs it comes.
"""
