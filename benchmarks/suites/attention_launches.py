"""Launches of `weave::masked_attention` for shapes that span the table: what the launch plan is fitted from.

Every kernel variant is compiled beforehand, all at a time; splits need no compilation. A launch whose result is not the
reference's is said and left out. A row is one launch; its baseline `planned` is what the plan launches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest import mock

from torch.nn.attention import SDPBackend

from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite
from benchmarks.suites.attention_decode import PHASE, Decode, Prefill
from benchmarks.suites.attention_decode import Case as Case
from benchmarks.workloads.attention import Call, DecodeCase, DecodeData, PrefillData, times_us, usable
from weaveopt.ops.attention import gpu
from weaveopt.ops.attention.plan import AttentionLaunch, plan

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
SECONDS = Setting("seconds", 100.0, "no case begins after that")
PREFILL_TOKENS = (2048, 8192)
PREFILL_LOOPS = ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3))
"""Rows of a tile, keys of a block, warps, stages."""
AT_A_TIME = 16
"""Graphs that take turns."""


def cases(asked: Asked) -> list[Case]:
    every: list[Case] = [Prefill(tokens) for tokens in PREFILL_TOKENS]
    every += [Decode(batch, filled, heads, filled) for batch, filled, heads in SHAPES]
    return [case for case in every if case.phase in asked.of(PHASE)]


def launches(base: AttentionLaunch, tiles: int, keys: int, num_sms: int) -> Iterator[AttentionLaunch]:
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


def forms_of_combine(how: AttentionLaunch) -> Iterator[AttentionLaunch]:
    for columns, warps in COMBINES:
        yield replace(how, combine_columns=columns, combine_warps=warps)


def described(how: AttentionLaunch) -> dict[str, record.Scalar]:
    return {
        "block_m": how.block_m, "block_n": how.block_n, "warps": how.num_warps, "stages": how.num_stages,
        "splits": how.num_splits, "inner": how.inner, "columns": how.combine_columns,
        "combine_warps": how.combine_warps,
    }  # fmt: skip


def compile_all(calls: list[Call]) -> None:
    """Compiles the kernels of all calls at a time; an error is raised again where the launch is timed."""
    from triton import AsyncCompileMode

    from weaveopt.ops.attention import kernels

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


def prefill_plans() -> Iterator[AttentionLaunch]:
    for block_m, block_n, warps, stages in PREFILL_LOOPS:
        yield AttentionLaunch(1, block_m, block_n, warps, stages, inner=True)
    yield AttentionLaunch(1, 128, 64, 8, 3, inner=False)


def timed(
    place: Place, makers: dict[AttentionLaunch, Callable[[], Call]], data: DecodeData | PrefillData, end: float
) -> dict[AttentionLaunch, float]:
    """Microseconds of each launch that is right, as long as time allows."""
    if isinstance(data, DecodeData):
        want, num_copies, least_calls = data.expected(), data.num_copies, 3
    else:
        want, num_copies, least_calls = data.sdpa(SDPBackend.CUDNN_ATTENTION, masked=False)(0).float(), 1, 4
    plans, found = list(makers), dict[AttentionLaunch, float]()
    for first in range(0, len(plans), AT_A_TIME):
        if time.monotonic() > end:
            place.say(f"  {len(plans) - first} of {len(plans)} left out for want of time")
            break
        some = {str(at): makers[plans[at]] for at in range(first, min(first + AT_A_TIME, len(plans)))}
        right = usable(some, want, LARGEST_ERROR)
        us = times_us(place, right, num_copies, least_calls, rounds=5)
        found |= {plans[int(at)]: each for at, each in us.items()}
    return found


def decode_rows(place: Place, case: Decode) -> Iterator[record.Row]:
    data, end = DecodeData(case), time.monotonic() + SHAPE_SECONDS
    num_sms = gpu.num_sms(data.device)
    planned = plan(data.shape, num_sms)
    every = [planned, *launches(planned, case.batch * case.key_heads, case.filled, num_sms)]
    found = timed(place, {how: partial(data.weave, how) for how in every}, data, end)
    best = min(found, key=lambda how: found[how], default=planned)
    if best.num_splits > 1:
        forms = {how: partial(data.weave, how) for how in forms_of_combine(best)}
        found |= timed(place, forms, data, max(end, time.monotonic() + 1.0))
    theirs = times_us(place, {"sdpa_gqa": data.sdpa(masked=False)}, data.num_copies)
    shape: dict[str, record.Scalar] = {"phase": "decode", "batch": case.batch, "filled": case.filled}
    yield from rows_of({**shape, "key_heads": case.key_heads}, found, planned, theirs)


def prefill_rows(place: Place, tokens: int) -> Iterator[record.Row]:
    data = PrefillData(tokens)
    for masked in (False, True):
        makers = {how: partial(data.weave, masked, how) for how in prefill_plans()}
        found = timed(place, makers, data, time.monotonic() + SHAPE_SECONDS)
        theirs = times_us(place, {"cudnn": data.sdpa(SDPBackend.CUDNN_ATTENTION, masked)}, 1, 4)
        yield from rows_of({"phase": "prefill", "tokens": tokens, "mask": masked}, found, next(iter(makers)), theirs)


def rows_of(
    shape: dict[str, record.Scalar],
    found: dict[AttentionLaunch, float],
    planned: AttentionLaunch,
    theirs: dict[str, float],
) -> Iterator[record.Row]:
    """A row of each launch, the fastest first."""
    beside = {**theirs, **({"planned": found[planned]} if planned in found else {})}
    for how, us in sorted(found.items(), key=lambda pair: pair[1]):
        yield record.row(case={**shape, **described(how)}, weave_us=us, baselines=beside)


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    end = time.monotonic() + asked.of(SECONDS)
    calls = decode_calls() if any(case.phase == "decode" for case in cases) else []
    if any(case.phase == "prefill" for case in cases):
        small = PrefillData(PREFILL_TOKENS[0])
        calls += [small.weave(masked, how) for masked in (False, True) for how in prefill_plans()]
    try:
        compile_all(calls)
    except Exception as refused:  # they are compiled one by one then, where they are timed
        print(f"not compiled beforehand: {refused!r}", flush=True)
    calls.clear()
    for done, case in enumerate(cases):
        if time.monotonic() > end:
            place.say(f"left out for want of time: {cases[done:]}")
            break
        yield from prefill_rows(place, case.tokens) if isinstance(case, Prefill) else decode_rows(place, case)


SUITES = (
    Suite(
        "attention_launches", "every launch that the attention's plan may choose", Needs(GPU, worlds=(1,)), cases, rows,
        ours=("every launch",), baselines=("planned", "sdpa_gqa", "cudnn"), settings=(PHASE, SECONDS),
        by_name_only=True,
    ),
)  # fmt: skip
