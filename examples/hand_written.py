"""weave on a model written by hand: functional collectives, no transformers.

    torchrun --nproc-per-node 2 examples/hand_written.py

The block is what a row-parallel layer does: GEMM of this rank's share, all-reduce, residual, RMSNorm. Exits with 1 if
the compiled block differs from eager beyond rounding.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce

import tiny_llama
import weaveopt

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class RowParallelBlock(nn.Module):
    """`norm(residual + all_reduce(x @ w.T))`, with `x` and `w` split along the inner dimension."""

    def __init__(self, hidden: int, inner: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.product = nn.Linear(inner // group.size(), hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=1e-6)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + all_reduce(self.product(x), "sum", self.group)
        return self.norm(residual), residual


def main() -> int:
    with tiny_llama.ranks() as here:
        assert dist.group.WORLD is not None
        worst = 0.0
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)  # the residual and the norm are the same on all ranks
            residual = torch.randn(4, 16, 1024, dtype=dtype, device=here.device)
            block = RowParallelBlock(1024, 1024, dist.group.WORLD).to(here.device, dtype)
            torch.manual_seed(here.rank + 1)
            x = torch.randn(4, 16, 1024 // here.world, dtype=dtype, device=here.device)
            compiled = torch.compile(block, backend="weave")
            with torch.no_grad():
                expected, found = block(x, residual), compiled(x, residual)
            error = max(float((e - f).abs().max() / e.abs().max()) for e, f in zip(expected, found, strict=True))
            here.say(f"{dtype}: largest difference from eager {error:.1e} of the largest value")
            worst = max(worst, error / TOLERANCE[dtype])
            here.say(str(weaveopt.report(compiled)))
        return 0 if worst <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
