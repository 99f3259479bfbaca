"""On GPUs there is no kernel of ours yet: every site is left to Inductor and NCCL with its reasons; nothing breaks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from tests import forms
from tests.ranks import run_ranks
from tests.tolerances import LIBRARY, assert_close
from weaveopt.decision import LEAVE

pytestmark = pytest.mark.multigpu


def _left_alone(rank: int) -> list[set[str]]:
    import weaveopt

    torch.cuda.set_device(rank)
    weights = forms.make_weights(torch.bfloat16)
    product, norm = weights.product.cuda(), weights.norm.cuda()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + functional.all_reduce(x @ product, "sum", dist.group.WORLD)
        return forms.rms(total, norm), total

    x = torch.randn(2, 9, forms.INNER, generator=torch.Generator().manual_seed(rank)).bfloat16().cuda()
    residual = torch.randn(2, 9, forms.HIDDEN, generator=torch.Generator().manual_seed(7)).bfloat16().cuda()
    with torch.no_grad():
        want = block(x, residual)
        for settings in ({"options": {"machine": "h200x4"}}, {"options": {"machine": "h200x4", "cuda_graphs": True}}):
            torch._dynamo.reset()
            compiled = torch.compile(block, backend="weave", **settings)  # type: ignore[call-overload]
            for _ in range(3):
                for a, b in zip(compiled(x, residual), want, strict=True):
                    assert_close(a.cpu(), b.cpu(), LIBRARY)
    decisions = [d for graph in weaveopt.report().graphs for d in graph.decisions]
    assert decisions and all(d.chosen.choice == LEAVE for d in decisions)
    return [{r.code for c in d.alternatives for r in c.rejections} for d in decisions]


def test_every_site_is_left_with_its_reasons() -> None:
    for codes in run_ranks(_left_alone, 2, timeout_s=240, gpus=True):
        assert all({"no_kernel", "fabric_needs_cpu"} <= site for site in codes)
