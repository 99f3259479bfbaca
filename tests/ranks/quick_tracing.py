"""Keeps Dynamo from computing what only its logs and statistics show: a tenth of what it takes to compile a model.

What is compiled, and which guards it has, stays the same.
"""

from __future__ import annotations

import logging

import torch._dynamo.config
import torch._dynamo.guards as guards
import torch._dynamo.symbolic_convert as symbolic_convert
import torch._dynamo.trace_rules as trace_rules
import torch._logging._internal as logs
import torch.distributed


class _NoCommonSubexpressions:
    """Stands in for `guards.PyExprCSEPass`: guards of symbolic sizes evaluate what they share more than once.

    To find it, Dynamo parses all of them and unparses each of their parts.
    """

    def count(self, expressions: list[str]) -> None:
        pass

    def replace(self, expression: str) -> tuple[list[str], str]:
        return [], expression


def install() -> None:
    """For this process, and those that are forked from it."""
    # Each graph's guards are checked with the clock, once 32 MB were written so that they are in no cache of the core.
    guards.profile_guard_manager = lambda root, scope, rounds: 0.0
    guards.PyExprCSEPass = _NoCommonSubexpressions  # type: ignore[misc,assignment]
    # Names of functions in a log of calls, for which all of a model's source file is split into tokens.
    symbolic_convert.get_funcname = lambda filename, lineno: None
    # A log of each object that a graph changes, with the stack of the call.
    torch._dynamo.config.side_effect_replay_policy = "silent"
    # A trace for tools, written as long as its logger has handlers: torch's own, which ends when it first finds that
    # nobody asked for it, and those that pytest gives to all loggers that it finds and that pass nothing on.
    logs.trace_log = logging.Logger(logs.trace_log.name)
    # Each process group that is made has the next compile look up thousands of names anew, in case the rules were read
    # before torch.distributed was there.
    trace_rules.clear_lru_cache()
    trace_rules.clear_lru_cache = lambda: None
