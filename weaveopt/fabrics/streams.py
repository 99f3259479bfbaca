"""The communication stream of a process group on GPUs: the one stream on which its begun calls run.

Kernels of two branches of a CUDA graph have neither a promised order nor promised concurrency, and kernels that wait
for peers need all of their CTAs resident at once. So whatever waits for a peer while other work runs is on this one
stream of its group, in one order on all ranks.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weaveopt import _native


@cache
def communication_stream(group: str, device: int) -> _native.SideStream:
    """Return the communication stream of `group` on a GPU; made before any capture, when its first call is bound."""
    from weaveopt import _native

    return _native.SideStream(device)
