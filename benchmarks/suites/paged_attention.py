"""`weave::paged_attention` on one GPU: decode of many requests over a paged cache, against gathered keys and libraries.

bf16, head size 128, pages of 256 rows in a random order; a request has as many keys as the case says. `gather_sdpa` is
what transformers does: all rows gathered, heads repeated, one attention of all queries over the keys of all
requests with a mask; `flash_attn` is `flash_attn_with_kvcache` over the same pages, where that package is installed.
Each runs in one CUDA graph. The bound is the requests' keys and values at the rate of `gpu_limits`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks import gpu_limits, record
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, product
from benchmarks.workloads.attention import Call, times_us, usable
from weaveopt.cost_model import Attention
from weaveopt.measure.cases.attention.paged import PAGE, paged_operands
from weaveopt.ops.attention import gpu
from weaveopt.ops.attention.paged_gpu import attend, plan_paged
from weaveopt.ops.attention.paged_shapes import PagedOperands
from weaveopt.ops.attention.shapes import Scores

Tensor = torch.Tensor
HEADS = {"llama_8b": (32, 8), "llama_70b_tp2": (32, 4)}
"""Query and key heads of a rank; Qwen3-30B has those of the second."""
MODELS = Setting("models", tuple(HEADS), quick=("llama_8b",), among=tuple(HEADS))
REQUESTS = Setting("requests", (8, 32, 128, 256), quick=(8,))
KEYS = Setting("keys", (512, 4096), quick=(512,))
SIZE = 128
SCALE = SIZE**-0.5
MOST_GATHERED_BYTES = 24e9
BASELINES = ("gather_sdpa", "flash_attn")


@dataclass(frozen=True)
class Case:
    model: str
    requests: int
    keys: int

    @property
    def filled_bytes(self) -> int:
        return 2 * 2 * self.requests * self.keys * HEADS[self.model][1] * SIZE


def cases(asked: Asked) -> list[Case]:
    return product(Case, asked.of(MODELS), asked.of(REQUESTS), asked.of(KEYS))


def gathered(operands: PagedOperands, mask: Tensor) -> Call:
    """As transformers: all rows gathered, heads repeated, one attention of all queries under `mask` [queries, keys]."""

    def call(_: int) -> Tensor:
        rows = operands.rows
        found = (each.index_select(0, rows.read_index).transpose(0, 1)[None] for each in rows.stored())
        keys, values = (each.repeat_interleave(operands.group, 1) for each in found)
        return F.scaled_dot_product_attention(operands.query, keys, values, mask[None, None], scale=SCALE)

    return call


class PagedData:
    """The operands of a case."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, (heads, key_heads) = case, HEADS[case.model]
        decode = Attention(case.requests, heads, key_heads, 1, case.keys, SIZE, "bfloat16")
        self.operands = paged_operands(decode, device)
        first = self.operands.rows.read_index.view(case.requests, case.keys)[:, ::PAGE]
        self.block_table = (first // PAGE).to(torch.int32)

    def weave(self) -> Call:
        return lambda _: attend(self.operands, Scores(SCALE))

    def gather_sdpa(self) -> Call:
        case, rows = self.case, self.operands.rows
        repeated = 2 * 2 * case.requests * case.keys * HEADS[case.model][0] * SIZE
        mask_bytes = 2 * case.requests**2 * case.keys
        if repeated + mask_bytes > MOST_GATHERED_BYTES:
            raise ValueError(f"gathered keys and the mask take {(repeated + mask_bytes) / 1e9:.0f} GB")
        own = torch.arange(case.requests, device=rows.cache.device)
        hidden = own[:, None] != own.repeat_interleave(case.keys)
        mask = torch.zeros_like(hidden, dtype=torch.bfloat16).masked_fill_(hidden, torch.finfo(torch.bfloat16).min)

        return gathered(self.operands, mask)

    def flash_attn(self) -> Call:
        library = importlib.import_module("flash_attn")
        rows = self.operands.rows
        stored = [each.reshape(-1) for each in rows.stored()]
        pages = min(each.numel() for each in stored) // (PAGE * rows.keys.shape[1] * SIZE)
        kept = [each[: pages * PAGE * rows.keys.shape[1] * SIZE].view(pages, PAGE, -1, SIZE) for each in stored]
        lengths = torch.full((self.case.requests,), self.case.keys, dtype=torch.int32, device=rows.cache.device)
        query = self.operands.query[0].transpose(0, 1)[:, None]

        def call(_: int) -> Tensor:
            found = library.flash_attn_with_kvcache(
                query, *kept, cache_seqlens=lengths, block_table=self.block_table, softmax_scale=SCALE, causal=True
            )
            attended: Tensor = found[:, 0].transpose(0, 1)[None]
            return attended

        return call


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    for case in cases:
        data = PagedData(case, place.device)
        makers: dict[str, Callable[[], Call]] = {
            name: partial(getattr(PagedData, name), data) for name in ("weave", *BASELINES)
        }
        times = times_us(place, usable(makers, None, 2e-2), 1)
        how, ours = plan_paged(data.operands, gpu.num_sms(place.device)), times.pop("weave")
        heads, key_heads = HEADS[case.model]
        bound = case.filled_bytes / gpu_limits.limits(place.device).bytes_per_us
        yield record.row(
            case={"model": case.model, "requests": case.requests, "keys": case.keys, "heads": heads,
                  "key_heads": key_heads},
            weave_us=ours, baselines=times, bound_us=bound,
            parameters={"splits": how.num_splits, "block_n": how.block_n,
                        "gb_per_s": round(case.filled_bytes / ours / 1e3), "share_of_bound": round(bound / ours, 3)},
        )  # fmt: skip
        del data
        torch.cuda.empty_cache()


SUITES = (
    Suite(
        "paged_attention", "decode of many requests over a paged cache", Needs(GPU, worlds=(1,)), cases, rows,
        ours=("weave",), baselines=BASELINES, bound="the requests' keys and values at the memory's rate",
        settings=(MODELS, REQUESTS, KEYS),
    ),
)  # fmt: skip
