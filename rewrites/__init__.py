"""The rules, one file each. A new rule is one file, one line here, and one test."""

from __future__ import annotations

from weaveopt.rewrites.all_reduce_rms_norm.rule import AllReduceRMSNorm
from weaveopt.rule import Rule

RULES: tuple[Rule, ...] = (AllReduceRMSNorm(),)


def names() -> tuple[str, ...]:
    return tuple(rule.name for rule in RULES)
