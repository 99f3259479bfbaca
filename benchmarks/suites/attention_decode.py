"""`weave::masked_attention` on one GPU: decode over what is filled of a cache, and prefill, against torch's kernels.

Each variant's calls run in one CUDA graph, over as many caches in turn as are needed to exceed the L2. bf16, head size
128; decode has 8 query heads for each key head, prefill 32 query and 4 key heads. The bound of decode is filled keys
and values at the rate of `gpu_limits`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import gpu_limits, record
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, product
from benchmarks.workloads.attention import (
    DECODE_VARIANTS,
    HEAD_SIZE,
    PREFILL_VARIANTS,
    DecodeCase,
    DecodeData,
    PrefillData,
    times_us,
    usable,
)
from weaveopt.ops.attention import gpu
from weaveopt.ops.attention.plan import plan

PHASES = ("prefill", "decode")
PHASE = Setting("phases", PHASES, among=PHASES)
BATCHES = Setting("batches", (1, 8, 32, 128), quick=(8,))
FILLED = Setting("filled", (512, 4096, 32768), quick=(512,))
KEY_HEADS = Setting("key_heads", (1, 4, 8), quick=(8,))
CAPACITY = Setting("capacity", 1.0, "the cache's positions, as a multiple of the filled")
TOKENS = Setting("tokens", (512, 1024, 2048, 4096, 8192, 16384), quick=(512,))
WITHOUT = Setting[tuple[str, ...]]("without", (), "variants not to run")
SECONDS = Setting("seconds", 100.0, "no case begins after that")
MOST_BYTES = 60e9


@dataclass(frozen=True)
class Prefill:
    tokens: int
    phase: str = "prefill"


@dataclass(frozen=True)
class Decode(DecodeCase):
    phase: str = "decode"


Case = Prefill | Decode


def cases(asked: Asked) -> list[Case]:
    prefills = [Prefill(tokens) for tokens in asked.of(TOKENS)]
    decodes = [
        Decode(batch, filled, heads, int(filled * asked.of(CAPACITY)))
        for batch, filled, heads in product(lambda *sizes: sizes, *map(asked.of, (BATCHES, FILLED, KEY_HEADS)))
    ]
    every: list[Case] = [*prefills, *(case for case in decodes if case.cache_bytes <= MOST_BYTES)]
    return [case for case in every if case.phase in asked.of(PHASE)]


def decode_row(place: Place, case: Decode, without: Sequence[str]) -> record.Row:
    data = DecodeData(case)
    makers = {
        name: partial(make, data) for name, make in DECODE_VARIANTS.items() if name not in without and data.fits(name)
    }
    times = times_us(place, usable(makers, data.expected(), 2e-2), data.num_copies)
    how, ours = plan(data.shape, gpu.num_sms(data.device)), times.pop("weave")
    return record.row(
        case={
            "phase": "decode", "batch": case.batch, "filled": case.filled, "key_heads": case.key_heads,
            "capacity": case.capacity, "heads": data.shape.heads, "head_size": HEAD_SIZE,
        },
        weave_us=ours, baselines=times, bound_us=case.filled_bytes / gpu_limits.limits(data.device).bytes_per_us,
        parameters={
            "splits": how.num_splits, "block_n": how.block_n, "num_warps": how.num_warps, "num_stages": how.num_stages,
            "gb_per_s": round(case.filled_bytes / ours / 1e3),
        },
    )  # fmt: skip


def prefill_rows(place: Place, tokens: int, without: Sequence[str]) -> list[record.Row]:
    data = PrefillData(tokens)
    makers = {name: partial(make, data) for name, make in PREFILL_VARIANTS.items() if name not in without}
    times = times_us(place, usable(makers, None, 3e-2), 1, least_calls=4)
    theirs = {name: us for name, us in times.items() if not name.startswith("weave")}
    return [
        record.row(
            case={"phase": "prefill", "tokens": tokens, "mask": name != "weave_causal", "head_size": HEAD_SIZE},
            weave_us=us, baselines=theirs, parameters={"tflops": round(data.flops / us / 1e6)},
        )
        for name, us in times.items()
        if name.startswith("weave")
    ]  # fmt: skip


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    end, left_out = time.monotonic() + asked.of(SECONDS), []
    for case in cases:
        if time.monotonic() > end:
            left_out.append(str(case))
        elif isinstance(case, Prefill):
            yield from prefill_rows(place, case.tokens, asked.of(WITHOUT))
        else:
            yield decode_row(place, case, asked.of(WITHOUT))
        torch.cuda.empty_cache()
    if left_out:
        place.say(f"left out for want of time: {'; '.join(left_out)}")


SUITES = (
    Suite(
        "attention_decode", "attention over what is filled of a cache, and prefill", Needs(GPU, worlds=(1,)), cases,
        rows, ours=("weave", "weave_causal", "weave_mask"),
        baselines=tuple(name for name in (*DECODE_VARIANTS, *PREFILL_VARIANTS) if not name.startswith("weave")),
        bound="decode: filled keys and values at the memory's rate",
        settings=(PHASE, BATCHES, FILLED, KEY_HEADS, CAPACITY, TOKENS, WITHOUT, SECONDS),
    ),
)  # fmt: skip
