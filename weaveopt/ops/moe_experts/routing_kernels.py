"""The Triton kernels that sort rows by expert. A row is a pair [token][choice], by its number `token * k + choice`.

    order[p]        the row at position p: those of expert 0 by number, then those of expert 1, ...; own ones only
    table[0]        how many tiles there are
    table[i + 1]    tile i: its expert, its first position, the end of its expert's positions, and their begin

Nothing is added atomically: the order is the same at every call.
"""

# mypy: ignore-errors
# Triton's language is not Python's: values have no types before they are traced.

import triton
import triton.language as tl


@triton.jit
def own_or_beyond(experts, rows, num_rows, num_experts):
    """The expert of each of `rows`; `num_experts` for a foreign choice, and beyond the last row."""
    ids = tl.load(experts + rows, mask=rows < num_rows, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def route(
    experts, order, table, num_rows, num_experts,
    BINS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program an expert: all count all rows, and each one places its own. BINS > num_experts."""
    if PDL:
        # The first GEMM may be launched: it waits by itself until all of this grid is written.
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_rows, BLOCK):
        counts += tl.histogram(own_or_beyond(experts, start + lanes, num_rows, num_experts), BINS)
    counts = tl.where(bins < num_experts, counts, 0)
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    tiles = (counts + (BLOCK_M - 1)) // BLOCK_M
    tile = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    if expert == 0:
        tl.store(table, tl.sum(tiles, 0))
    if count > 0:
        seen = first
        for start in range(0, num_rows, BLOCK):
            rows = start + lanes
            mine = own_or_beyond(experts, rows, num_rows, num_experts) == expert
            ones = mine.to(tl.int32)
            tl.store(order + seen + tl.cumsum(ones, 0) - 1, rows, mask=mine)
            seen += tl.sum(ones, 0)
        num_tiles = (count + (BLOCK_M - 1)) // BLOCK_M
        for start in range(0, num_tiles, BINS):
            at = start + bins
            record = table + (tile + at + 1) * 4
            tl.store(record, expert + tl.zeros([BINS], tl.int32), mask=at < num_tiles)
            tl.store(record + 1, first + at * BLOCK_M, mask=at < num_tiles)
            tl.store(record + 2, first + count + tl.zeros([BINS], tl.int32), mask=at < num_tiles)
            tl.store(record + 3, first + tl.zeros([BINS], tl.int32), mask=at < num_tiles)


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def count(
    experts, counts, num_rows, num_experts, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program a chunk of rows: how many of them each expert has, int32 [chunks, BINS]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    found = tl.histogram(own_or_beyond(experts, rows, num_rows, num_experts), BINS)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def place(
    experts, counts, order, table, num_rows, num_experts, max_tiles,
    BINS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a chunk of rows: places them behind those of earlier chunks, and writes its share of the tiles."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk, num_chunks = tl.program_id(0), tl.num_programs(0)
    bins = tl.arange(0, BINS)
    steps = tl.arange(0, STEP)
    totals, before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    for start in range(0, num_chunks, STEP):
        chunks = start + steps
        found = tl.load(counts + chunks[:, None] * BINS + bins[None, :], mask=(chunks < num_chunks)[:, None], other=0)
        totals += tl.sum(found, 0)
        before += tl.sum(tl.where((chunks < chunk)[:, None], found, 0), 0)
    totals = tl.where(bins < num_experts, totals, 0)
    firsts = tl.cumsum(totals, 0) - totals
    next_place = firsts + before
    for start in range(0, CHUNK, STEP):
        rows = chunk * CHUNK + start + steps
        ids = own_or_beyond(experts, rows, num_rows, num_experts)
        chosen = (ids[:, None] == bins[None, :]).to(tl.int32)
        places = tl.sum(chosen * (tl.cumsum(chosen, 0) - 1 + next_place[None, :]), 1)
        tl.store(order + places, rows, mask=ids < num_experts)
        next_place += tl.sum(chosen, 0)

    tiles = (totals + (BLOCK_M - 1)) // BLOCK_M
    tile_ends = tl.cumsum(tiles, 0)
    num_tiles = tl.sum(tiles, 0)
    if chunk == 0:
        tl.store(table, num_tiles)
    share = tl.cdiv(max_tiles, num_chunks)
    for start in range(chunk * share, min((chunk + 1) * share, num_tiles), STEP):
        at = start + steps
        there = (at < (chunk + 1) * share) & (at < num_tiles)
        expert = tl.sum((tile_ends[None, :] <= at[:, None]).to(tl.int32), 1)
        own = expert[:, None] == bins[None, :]
        first = tl.sum(tl.where(own, firsts[None, :], 0), 1)
        end = first + tl.sum(tl.where(own, totals[None, :], 0), 1)
        first_tile = tl.sum(tl.where(own, (tile_ends - tiles)[None, :], 0), 1)
        record = table + (at + 1) * 4
        tl.store(record, expert, mask=there)
        tl.store(record + 1, first + (at - first_tile) * BLOCK_M, mask=there)
        tl.store(record + 2, end, mask=there)
        tl.store(record + 3, first, mask=there)
