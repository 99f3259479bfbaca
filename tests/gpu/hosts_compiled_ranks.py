"""One rank of `test_hosts`: a compiled block between GPUs that take themselves for hosts, with a calibrated profile.

The rule is chosen by its price for a few tokens, on `nvshmem`, and computes what eager does, with CUDA graphs and
without; `--profile` is a file of `weaveopt calibrate` on such ranks.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import weaveopt
from tests.gpu.profiles import read_unchecked
from tests.graphs import forms
from tests.graphs.tolerances import LIBRARY, assert_close
from weaveopt.records.candidate import Fabric
from weaveopt.records.report import Decision

WIDE = 4096
FEW = (1, 8)
"""Tokens: a few, as in decode."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", required=True)
    profile = parser.parse_args().profile
    rank = int(os.environ["RANK"])
    os.environ["WEAVE_HOST"] = f"host{rank}"
    read_unchecked()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    shared = torch.Generator("cuda").manual_seed(3)
    product = torch.randn(forms.INNER, WIDE, generator=shared, device="cuda").bfloat16() / forms.INNER**0.5
    norm = torch.randn(WIDE, generator=shared, device="cuda").bfloat16().abs()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + functional.all_reduce(x @ product, "sum", dist.group.WORLD)
        return forms.rms(total, norm), total

    found: list[Decision] = []
    with torch.no_grad():
        for tokens in FEW:
            for cuda_graphs in (False, True):
                torch._dynamo.reset()
                options = {"machine": profile, "strict": True, "timeout_s": 30.0, "cuda_graphs": cuda_graphs}
                compiled = torch.compile(block, backend="weave", options=options, dynamic=False)  # type: ignore[call-overload]
                for seed in range(4):
                    own = torch.Generator("cuda").manual_seed(100 * seed + rank)
                    x = torch.randn(tokens, forms.INNER, generator=own, device="cuda").bfloat16()
                    residual = torch.randn(tokens, WIDE, generator=shared, device="cuda").bfloat16()
                    want = block(x, residual)
                    for result, expected in zip(compiled(x, residual), want, strict=True):
                        what = f"{tokens} tokens, cuda_graphs={cuda_graphs}"
                        assert_close(result.cpu(), expected.cpu(), LIBRARY, what)
                found += weaveopt.report().graphs[-1].decisions
    for decision in found:
        print(f"rank {rank}: {decision.chosen.choice} {decision.chosen.fabric.value} {decision.chosen.estimate}")
        assert decision.chosen.fabric is Fabric.NVSHMEM, [each.rejections for each in decision.alternatives]
    print(f"rank {rank}: compiled as in eager", flush=True)
    sys.stdout.flush()
    # NCCL's communicator cannot be destroyed while captured graphs hold it.
    os._exit(0)


if __name__ == "__main__":
    main()
