"""`weave::collective_wait`: the library's wait for a collective, after other collectives were started.

    wait_tensor(sum)        # torch.ops._c10d_functional: `sum` holds the collective's result afterwards

`sum` is the result of a functional collective (`_c10d_functional.all_reduce` and the like), of any shape and dtype;
`started` holds results of collectives in flight, which are neither read nor waited for. In a compiled graph they are
the one dependency that keeps a wait after the other collectives' starts: Inductor (torch 2.13) otherwise moves a start
down to its own wait, and fuses what reads two sums into one kernel that needs both waits. The mutated argument makes
what reads `sum` run after the wait.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def collective_wait(total: Tensor, started: list[Tensor]) -> None:
    """Wait until `total` holds its collective's result, on the current stream."""
    torch.ops._c10d_functional.wait_tensor(total)


def _fake(total: Tensor, started: list[Tensor]) -> None:
    return None


_library = torch.library.Library("weave", "FRAGMENT")
_library.define(
    "collective_wait(Tensor(a!) sum, Tensor[] started) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
_library.impl("collective_wait", collective_wait, "CPU")
_library.impl("collective_wait", collective_wait, "CUDA")
torch.library.register_fake("weave::collective_wait", _fake, lib=_library)
