"""One rank of `test_backend`: a compiled block on GPUs against eager, and in CUDA graphs. Started by torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import weaveopt
from tests.graphs import forms
from tests.graphs.tolerances import LIBRARY, assert_close
from weaveopt.records.candidate import Fabric

RULE = "all_reduce_rms_norm"
MAX_TOKENS = 64


WIDE, TOKENS = 8192, 2200
"""Width and number of rows that bulk copies distribute."""


def check_aliasing(rank: int, check: Callable[[tuple[Tensor, ...], tuple[Tensor, ...], str], None]) -> None:
    """Two sites whose normalized rows only GEMMs read: they alias the arena, with and without CUDA graphs, also after
    rows were filled at a mask, as those of an embedding that is spread over ranks."""
    shared = torch.Generator("cuda").manual_seed(3)

    def random(*shape: int, generator: torch.Generator = shared) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16() / shape[-2] ** 0.5

    into, out_of, norm = random(2, forms.INNER, WIDE), random(2, WIDE, forms.INNER), random(1, WIDE)[0].abs()

    def block(x: Tensor, residual: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        if mask is not None:
            x = x.clone()
            x[mask] = 0.0
        total = residual + functional.all_reduce(x @ into[0], "sum", dist.group.WORLD)
        inner = forms.rms(total, norm) @ out_of[0]
        total = total + functional.all_reduce(torch.nn.functional.silu(inner) @ into[1], "sum", dist.group.WORLD)
        return (forms.rms(total, norm) @ out_of[1],)

    with torch.no_grad():
        for cuda_graphs, fills in ((False, False), (True, False), (False, True), (True, True)):
            torch._dynamo.reset()
            options = {"machine": "h200x4", "strict": True, "timeout_s": 30.0, "cuda_graphs": cuda_graphs}
            compiled = torch.compile(block, backend="weave", options=options)  # type: ignore[call-overload]
            what = f"rows in the arena, cuda_graphs={cuda_graphs}, filled at a mask={fills}"
            for seed in range(4):
                own = torch.Generator("cuda").manual_seed(100 * seed + rank)
                x = torch.randn(TOKENS, forms.INNER, generator=own, device="cuda").bfloat16()
                residual = torch.randn(TOKENS, WIDE, generator=shared, device="cuda").bfloat16()
                mask = torch.rand(TOKENS, generator=own, device="cuda") < 0.5 if fills else None
                check(compiled(x, residual, mask), block(x, residual, mask), what)
            report = weaveopt.report().graphs[-1]
            aliased = [any(note.startswith("no copy: ") for note in d.chosen.notes) for d in report.decisions]
            assert aliased == [True, True], report.decisions


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    weights = forms.make_weights(torch.bfloat16)
    product, norm = weights.product.cuda(), weights.norm.cuda()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + functional.all_reduce(x @ product, "sum", dist.group.WORLD)
        return forms.rms(total, norm), total

    def inputs(tokens: int) -> tuple[Tensor, Tensor]:
        own, shared = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(7)
        x = torch.randn(2, tokens, forms.INNER, generator=own).bfloat16().cuda()
        return x, torch.randn(2, tokens, forms.HIDDEN, generator=shared).bfloat16().cuda()

    def check(got: tuple[Tensor, ...], want: tuple[Tensor, ...], what: str) -> None:
        for result, expected in zip(got, want, strict=True):
            assert_close(result.cpu(), expected.cpu(), LIBRARY, what)

    options = {"machine": "h200x4", "force": [RULE], "strict": True, "max_tokens": MAX_TOKENS, "timeout_s": 30.0}
    with torch.no_grad():
        for cuda_graphs in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(block, backend="weave", options={**options, "cuda_graphs": cuda_graphs})  # type: ignore[call-overload]
            for _ in range(4):
                check(compiled(*inputs(9)), block(*inputs(9)), f"cuda_graphs={cuda_graphs}")
        # A symbolic token count, up to what was planned for and above it.
        torch._dynamo.reset()
        compiled = torch.compile(block, backend="weave", options=options)  # type: ignore[call-overload]
        for tokens in (9, 3, 32, 40):
            x, residual = inputs(tokens)
            # Only the sequence: with dynamic=True older versions of torch make the hidden size symbolic as well.
            torch._dynamo.mark_dynamic(x, 1)
            torch._dynamo.mark_dynamic(residual, 1)
            check(compiled(x, residual), block(x, residual), f"{2 * tokens} tokens")

        # By hand around the compiled call.
        x, residual = inputs(9)
        compiled(x, residual)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compiled(x, residual)
        for seed in (1, 2):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(10 * seed + rank)))
            graph.replay()
            check(captured, block(x, residual), f"replay {seed}")
    check_aliasing(rank, check)
    decisions = [d for report in weaveopt.report().graphs for d in report.decisions]
    assert decisions and all(d.rewritten and d.chosen.fabric is Fabric.PEER for d in decisions), decisions
    print(f"rank {rank}: compiled as in eager", flush=True)
    sys.stdout.flush()
    # NCCL's communicator cannot be destroyed while captured graphs hold it.
    os._exit(0)


if __name__ == "__main__":
    main()
