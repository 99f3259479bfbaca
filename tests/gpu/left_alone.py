"""One rank of `test_backend`: a block on GPUs, where no rule has a kernel yet. Started by torchrun."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import weaveopt
from tests import forms
from tests.tolerances import LIBRARY, assert_close
from weaveopt.decision import LEAVE


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    weights = forms.make_weights(torch.bfloat16)
    product, norm = weights.product.cuda(), weights.norm.cuda()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + functional.all_reduce(x @ product, "sum", dist.group.WORLD)
        return forms.rms(total, norm), total

    x = torch.randn(2, 9, forms.INNER, generator=torch.Generator().manual_seed(rank)).bfloat16().cuda()
    residual = torch.randn(2, 9, forms.HIDDEN, generator=torch.Generator().manual_seed(7)).bfloat16().cuda()
    with torch.no_grad():
        want = block(x, residual)
        for cuda_graphs in (False, True):
            torch._dynamo.reset()
            options = {"machine": "h200x4", "cuda_graphs": cuda_graphs}
            compiled = torch.compile(block, backend="weave", options=options)  # type: ignore[call-overload]
            for _ in range(3):
                for got, wanted in zip(compiled(x, residual), want, strict=True):
                    assert_close(got.cpu(), wanted.cpu(), LIBRARY, f"cuda_graphs={cuda_graphs}")
    decisions = [d for graph in weaveopt.report().graphs for d in graph.decisions]
    assert decisions and all(d.chosen.choice == LEAVE for d in decisions)
    for decision in decisions:
        codes = {r.code for c in decision.alternatives for r in c.rejections}
        assert {"no_kernel", "fabric_needs_cpu"} <= codes, codes
    print(f"rank {rank}: every site left, with its reasons", flush=True)
    sys.stdout.flush()
    # NCCL's communicator cannot be destroyed while captured graphs hold it.
    os._exit(0)


main()
