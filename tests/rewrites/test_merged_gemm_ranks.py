"""GEMMs of one input as one, in graphs whose exchanges other rules rewrite, on real ranks."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn

import weaveopt
from tests.graphs.executing import without_code
from tests.ranks import run_ranks
from weaveopt.backend import weave
from weaveopt.ops.merged_gemm.adjacent import joined
from weaveopt.rewrites import RULES
from weaveopt.rewrites.merged_gemm import RULE
from weaveopt.rule import RuleSet
from weaveopt.sites.projections.matcher import KIND, ProjectionMatcher

HIDDEN, HEAD, HEADS, KV_HEADS, INNER, LAYERS = 48, 8, 4, 2, 32, 2
ON_CPU = RuleSet((*RULES.matchers, ProjectionMatcher(("cpu",))), RULES.site_rules, RULES.graph_rules)
OTHERS = ("all_reduce_rms_norm", "gemm_all_reduce", "token_split", "shard_norm")


class Layer(nn.Module):
    """A decoder's layer, of which every rank has heads and columns of its own."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        sizes = {
            "q": (HIDDEN, HEADS * HEAD), "k": (HIDDEN, KV_HEADS * HEAD), "v": (HIDDEN, KV_HEADS * HEAD),
            "gate": (HIDDEN, INNER), "up": (HIDDEN, INNER),
        }  # fmt: skip
        for name, (inner, outer) in sizes.items():
            setattr(self, name, nn.Linear(inner, outer, bias=bias))
        self.out, self.down = nn.Linear(HEADS * HEAD, HIDDEN, bias=False), nn.Linear(INNER, HIDDEN, bias=False)

    def reduced(self, x: Tensor) -> Tensor:
        assert dist.group.WORLD is not None
        return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))

    def forward(self, x: Tensor) -> Tensor:
        rows = F.rms_norm(x, (HIDDEN,))
        q, k, v = (each(rows).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1])
        mask = places[None, :] <= places[:, None]
        heads = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        x = x + self.reduced(self.out(heads.transpose(1, 2).flatten(-2)))
        rows = F.rms_norm(x, (HIDDEN,))
        return x + self.reduced(self.down(F.silu(self.gate(rows)) * self.up(rows)))


def _problems(rank: int, others: tuple[str, ...], shapes: tuple[tuple[int, int], ...], is_code: bool) -> list[str]:
    problems = []
    for other in others:
        for shape in shapes:
            torch._dynamo.reset()
            torch.manual_seed(rank)
            model = nn.Sequential(*(Layer(bias=other == OTHERS[0]) for _ in range(LAYERS)))
            x = torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(shape[1]))
            options = {"force": [RULE, other], "strict": True}
            call = torch.compile(model, backend=partial(weave, options=options, rules=ON_CPU), dynamic=False)
            with torch.no_grad():
                wanted = model(x)
                for _ in range(2):
                    found = call(x)
                    if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())):
                        problems.append(f"{other} {shape}: {(found - wanted).abs().max():.2e}")
            graph = weaveopt.report(model).graphs[-1]
            merged = [each for each in graph.decisions if each.site.kind == KIND]
            taken = sum(each.rewritten for each in merged)
            if other != "shard_norm" and (taken != len(merged) or taken < 2 * LAYERS):
                problems.append(f"{other} {shape}: {taken} of {len(merged)} are merged")
            split = graph.variant.startswith("token_split")
            if split != (other == "token_split"):
                problems.append(f"{other} {shape}: {graph.variant} runs")
            layers = [each for each in model if isinstance(each, Layer)]
            together = [joined([each.q.weight, each.k.weight, each.v.weight]) is not None for each in layers]
            if is_code and not all(together):
                problems.append(f"{other} {shape}: weights are apart: {together}")
    return problems


def _interpreted(rank: int) -> list[str]:
    with without_code():
        return _problems(rank, OTHERS, ((1, 12), (2, 7)), is_code=False)


def test_with_rules_that_rewrite_the_exchanges() -> None:
    assert run_ranks(_interpreted, 2, timeout_s=300) == [[], []]


def _compiled(rank: int) -> list[str]:
    return _problems(rank, ("token_split",), ((1, 12),), is_code=True)


def test_parts_of_a_batch_share_the_weights() -> None:
    """Through Inductor: both parts' GEMMs read the same joined weights."""
    assert run_ranks(_compiled, 2, timeout_s=300) == [[], []]
