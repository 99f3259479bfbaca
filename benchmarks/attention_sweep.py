"""Launches of `weave::masked_attention` tried for shapes that span the table: what the launch plan is fitted from.

Every kernel variant is compiled beforehand, all at a time; splits need no compilation. A launch whose result is not the
reference's is told and left out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch.nn.attention import SDPBackend

from benchmarks.attention_cases import Call, DecodeCase, DecodeData, PrefillData, time_graph
from weaveopt.ops.masked_attention import gpu
from weaveopt.ops.masked_attention.plan import Plan, plan

SHAPES = (
    (1, 512, 1), (1, 512, 8), (1, 4096, 1), (1, 4096, 8), (1, 32768, 1), (1, 32768, 8), (8, 512, 8), (8, 4096, 4),
    (8, 4096, 8), (8, 32768, 8), (64, 512, 8), (64, 4096, 8), (32, 4096, 4), (128, 512, 4), (64, 32768, 4),
)  # fmt: skip
"""Sequences, filled positions, key heads."""
LOOPS = ((64, 4, 3), (128, 8, 2), (32, 4, 3), (64, 4, 4), (32, 4, 4), (128, 8, 3), (64, 4, 2), (32, 2, 3))
"""Keys of a block, warps, stages; the most hopeful first, as a shape's time may end."""
COMBINES = ((128, 1), (128, 4), (64, 1), (32, 1), (32, 4))
"""Columns and warps of a program of `combine`."""
PROGRAMS = (0.5, 0.97, 1.94, 2.9, 3.9, 5.8, 7.8)
"""For each SM, at most: a tile has as many splits as that allows."""
LEAST_SHARE = 32
"""Keys of a split."""
SHAPE_SECONDS = 6.0
LARGEST_ERROR = 2e-2
PREFILL_TOKENS = (2048, 8192)
PREFILL_LOOPS = ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3))
"""Rows of a tile, keys of a block, warps, stages."""
Found = dict[str, int | float | bool]


def launches(base: Plan, tiles: int, keys: int, num_sms: int) -> Iterator[Plan]:
    """Every loop with every count of splits."""
    counts = {max(1, min(128, keys // LEAST_SHARE, int(share * num_sms) // tiles)) for share in PROGRAMS}
    if tiles * 4 >= num_sms:
        counts.add(1)
    # Many tiles: ends that are more even. Few: less to combine.
    counts |= {2, 3, 4, 8} if tiles >= num_sms else {-(-max(counts) // 2), -(-max(counts) // 4)}
    for block_n, warps, stages in LOOPS:
        for count in sorted(counts):
            how = replace(base, block_n=block_n, num_warps=warps, num_stages=stages, num_splits=count)
            yield how


def forms_of_combine(how: Plan) -> Iterator[Plan]:
    for columns, warps in COMBINES:
        yield replace(how, combine_columns=columns, combine_warps=warps)


def described(how: Plan) -> Found:
    return {
        "block_m": how.block_m, "block_n": how.block_n, "warps": how.num_warps, "stages": how.num_stages,
        "splits": how.num_splits, "inner": how.inner, "columns": how.combine_columns,
        "combine_warps": how.combine_warps,
    }  # fmt: skip


def compile_all(calls: list[Call]) -> None:
    """What the calls launch, all compiled at a time; an error comes again where the launch is timed."""
    from triton import AsyncCompileMode

    from weaveopt.ops.masked_attention import kernels

    began = time.monotonic()
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True), ExitStack() as patches:
        for kernel in (kernels.attention, kernels.combine):
            patches.enter_context(mock.patch.object(kernel, "run", partial(_warm_up, kernel.run)))
        for call in calls:
            call(0)
    print(f"{len(calls)} launches compiled by {threads} threads in {time.monotonic() - began:.1f} s", flush=True)


def _warm_up(run: Callable[..., object], *arguments: object, warmup: bool, **options: object) -> object:
    return run(*arguments, warmup=True, **options)


def decode_calls() -> list[Call]:
    """Launches of all variants of the kernels, whatever the shape: a sequence and many specialize them differently."""
    found = []
    for batch, filled, key_heads in ((1, 512, 1), (8, 512, 8)):
        data = DecodeData(DecodeCase(batch, filled, key_heads, filled))
        base = plan(data.shape, gpu.num_sms(data.device))
        for block_n, warps, stages in LOOPS:
            how = replace(base, block_n=block_n, num_warps=warps, num_stages=stages)
            found += [data.weave(replace(how, num_splits=count)) for count in (1, 2)]
        for count in (2, 4, 8, 16, 32, 64):
            split = replace(base, num_splits=count)
            found += [data.weave(how) for how in (split, *forms_of_combine(split))]
    return found


def timed(call: Call, want: torch.Tensor, num_copies: int, how: Plan, least_calls: int = 3) -> float | None:
    try:
        error = (call(0).float() - want).abs().max().item()
        if not error < LARGEST_ERROR:
            print(f"  WRONG by {error}: {how}", flush=True)
            return None
        return time_graph(call, num_copies, least_calls, replays=5)
    except Exception as refused:  # Triton has no common base: out of shared memory, of registers
        print(f"  {str(refused).splitlines()[0][:100]}: {how}", flush=True)
        return None


def sweep_decode(case: DecodeCase) -> list[Found]:
    """All launches of one shape; prints the best of them, and the planned one."""
    data, end = DecodeData(case), time.monotonic() + SHAPE_SECONDS
    want, num_sms = data.expected(), gpu.num_sms(data.device)
    planned, tiles = plan(data.shape, num_sms), case.batch * case.key_heads
    found: list[tuple[float, Plan]] = []
    left_out = 0

    def try_all(some: Iterator[Plan]) -> None:
        nonlocal left_out
        for how in some:
            if time.monotonic() > end:
                left_out += 1
                continue
            us = timed(data.weave(how), want, data.num_copies, how)
            if us is not None:
                found.append((us, how))
        found.sort(key=lambda pair: pair[0])

    theirs = time_graph(data.sdpa(masked=False), data.num_copies)
    ours = timed(data.weave(planned), want, data.num_copies, planned)
    try_all(launches(planned, tiles, case.filled, num_sms))
    if found and found[0][1].num_splits > 1:
        end = max(end, time.monotonic() + 1.0)
        try_all(forms_of_combine(found[0][1]))
    print(
        f"{case.batch} x {case.filled} x {case.key_heads}: sdpa_gqa {theirs:.2f} us, planned {ours or 0.0:.2f} us "
        f"{brief(planned)}; {len(found)} tried, {left_out} left out",
        flush=True,
    )
    for us, how in found[:5]:
        print(f"   {us:9.2f} us {case.filled_bytes / us / 1e3:6.0f} GB/s {theirs / us:5.2f}x {brief(how)}", flush=True)
    shape: Found = {"batch": case.batch, "filled": case.filled, "key_heads": case.key_heads, "sdpa_us": theirs}
    return [{**shape, "us": round(us, 3), **described(how)} for us, how in found]


def brief(how: Plan) -> str:
    return (
        f"[{how.block_m} x {how.block_n}, {how.num_warps} warps, {how.num_stages} stages, {how.num_splits} splits"
        f"{', inner' if how.inner else ''}; combine {how.combine_columns} columns, "
        f"{how.combine_warps} warps]"
    )


def prefill_plans() -> Iterator[Plan]:
    for block_m, block_n, warps, stages in PREFILL_LOOPS:
        yield Plan(1, block_m, block_n, warps, stages, inner=True)
    yield Plan(1, 128, 64, 8, 3, inner=False)


def sweep_prefill(tokens: int) -> list[Found]:
    data, rows = PrefillData(tokens), []
    want = data.sdpa(SDPBackend.CUDNN_ATTENTION, masked=False)(0).float()
    for masked in (False, True):
        found = []
        for how in prefill_plans():
            us = timed(data.weave(masked, how), want, 1, how, least_calls=4)
            if us is not None:
                found.append((us, how))
        print(f"prefill {tokens}, {'mask' if masked else 'causal'}:", flush=True)
        for us, how in sorted(found, key=lambda pair: pair[0]):
            print(f"   {us:9.2f} us {data.flops / us / 1e6:5.0f} TFLOP/s {brief(how)}", flush=True)
            rows.append({"tokens": tokens, "mask": masked, "us": round(us, 3), **described(how)})
    return rows


def sweep(output: Path | None, seconds: float, only: str | None) -> None:
    """Everything; `output` takes all launches and times as JSON, also of what was done when time ended."""
    end, rows = time.monotonic() + seconds, list[Found]()
    calls = decode_calls() if only != "prefill" else []
    if only != "decode":
        small = PrefillData(PREFILL_TOKENS[0])
        calls += [small.weave(masked, how) for masked in (False, True) for how in prefill_plans()]
    try:
        compile_all(calls)
    except Exception as refused:  # they are compiled one by one then, where they are timed
        print(f"not compiled beforehand: {refused!r}", flush=True)
    calls.clear()
    jobs = [partial(sweep_prefill, tokens) for tokens in PREFILL_TOKENS if only != "decode"]
    cases = [DecodeCase(batch, filled, heads, filled) for batch, filled, heads in SHAPES if only != "prefill"]
    jobs += [partial(sweep_decode, case) for case in cases]
    for done, job in enumerate(jobs):
        if time.monotonic() > end:
            print(f"left out for want of time: {jobs[done:]}", flush=True)
            break
        rows += job()
        torch.cuda.empty_cache()
        if output is not None:
            output.write_text(json.dumps(rows, separators=(",", ":")) + "\n")
