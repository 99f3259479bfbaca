"""`weave::paged_attention` on one GPU: prompts whose keys are rows of a paged cache, against gathered keys.

bf16, heads of 128, pages of 256 rows in a random order; `queries` are the last of a request's `keys`. `gather_sdpa` is
what transformers does: all rows gathered, heads repeated, one attention of all queries over the keys of all requests
with a mask. `unpaged_us` is torch's fastest causal attention over keys in order, for whole prompts: it cannot read a
paged cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite
from benchmarks.suites.paged_attention import HEADS, MOST_GATHERED_BYTES, SCALE, SIZE, gathered
from benchmarks.workloads.attention import Call, times_us, usable
from weaveopt.cost_model import Attention
from weaveopt.measure.cases.attention.paged import paged_operands
from weaveopt.ops.attention import gpu
from weaveopt.ops.attention.paged_gpu import attend, plan_paged
from weaveopt.ops.attention.shapes import Scores

Tensor = torch.Tensor
MODELS = Setting("models", tuple(HEADS), quick=("llama_8b",), among=tuple(HEADS))
SPANS = (
    (32, 128, 128),
    (8, 512, 512),
    (4, 1024, 1024),
    (1, 4096, 4096),
    (1, 512, 4096),
    (8, 37, 1500),
    (3, 1333, 1333),
)
"""Requests, queries and keys of each."""
UNPAGED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


@dataclass(frozen=True)
class Case:
    model: str
    requests: int
    queries: int
    keys: int

    @property
    def attention(self) -> Attention:
        heads, key_heads = HEADS[self.model]
        return Attention(self.requests, heads, key_heads, self.queries, self.keys, SIZE, "bfloat16", causal=True)


def cases(asked: Asked) -> list[Case]:
    return [Case(model, *span) for model in asked.of(MODELS) for span in SPANS]


class PromptData:
    """The operands of a case."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.operands = case, paged_operands(case.attention, device)

    def weave(self) -> Call:
        return lambda _: attend(self.operands, Scores(SCALE))

    def gather_sdpa(self) -> Call:
        case, device = self.case, self.operands.query.device
        all_queries, all_keys = case.requests * case.queries, case.requests * case.keys
        if 2 * all_queries * all_keys > MOST_GATHERED_BYTES:
            raise ValueError(f"the mask takes {2 * all_queries * all_keys / 1e9:.0f} GB")
        at_query, at_key = torch.arange(all_queries, device=device), torch.arange(all_keys, device=device)
        last = case.keys - case.queries + at_query % case.queries
        admitted = (at_query // case.queries)[:, None] == (at_key // case.keys)[None]
        admitted &= (at_key % case.keys)[None] <= last[:, None]
        mask = torch.zeros_like(admitted, dtype=torch.bfloat16).masked_fill_(~admitted, torch.finfo(torch.bfloat16).min)

        return gathered(self.operands, mask)

    def unpaged(self, backend: SDPBackend) -> Call:
        case, (heads, key_heads) = self.case, HEADS[self.case.model]
        query, key, value = (
            torch.randn(case.requests, case.keys, each, SIZE, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for each in (heads, key_heads, key_heads)
        )

        def call(_: int) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE, enable_gqa=True)

        return call


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    for case in cases:
        data = PromptData(case, place.device)
        makers: dict[str, Callable[[], Call]] = {"weave": data.weave, "gather_sdpa": data.gather_sdpa}
        calls = usable(makers, None, 2e-2)
        if case.queries == case.keys:
            calls |= {each.name: data.unpaged(each) for each in UNPAGED}
        times = times_us(place, calls, 1)
        unpaged = [us for each in UNPAGED if (us := times.pop(each.name, None)) is not None]
        how, ours = plan_paged(data.operands, gpu.num_sms(place.device)), times.pop("weave")
        heads, key_heads = HEADS[case.model]
        yield record.row(
            case={"model": case.model, "requests": case.requests, "queries": case.queries, "keys": case.keys,
                  "heads": heads, "key_heads": key_heads},
            weave_us=ours, baselines=times,
            parameters={"rows": how.block_m, "tflops": round(case.attention.flops / ours / 1e6),
                        "unpaged_us": round(min(unpaged), 1) if unpaged else "none"},
        )  # fmt: skip
        del data
        torch.cuda.empty_cache()


SUITES = (
    Suite(
        "paged_prompts", "prompts over a paged cache", Needs(GPU, worlds=(1,)), cases, rows, ours=("weave",),
        baselines=("gather_sdpa",), settings=(MODELS,),
    ),
)  # fmt: skip
