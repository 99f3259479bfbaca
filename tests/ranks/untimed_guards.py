"""Keeps Dynamo from timing its guards, as no test reads the times: a quarter of what it takes to compile a small
function.

Dynamo checks the guards of each graph it compiles once more with the clock, and before that writes over 32 MB, so that
they are not in the core's caches.
"""

from __future__ import annotations

import torch._dynamo.guards as guards


def install() -> None:
    guards.profile_guard_manager = lambda root, scope, rounds: 0.0
