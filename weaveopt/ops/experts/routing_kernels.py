"""The Triton kernel that sorts rows by expert. A row is a pair [token][choice], by its number `token * k + choice`.

    order[p]        the row at position p: those of expert 0 by number, then those of expert 1, ...; own ones only
    table[0]        how many tiles there are, and 0
    table[i + 1]    tile i: its expert, its first position, the end of its expert's positions, and their begin
    after them      0 for each tile

A GEMM counts from those zeros (csrc/experts/both.cuh).

Nothing is added atomically: the order is the same at every call. Many rows are sorted by csrc/experts/routing.cu,
which leaves the same, where it was built.
"""

# mypy: ignore-errors
# Triton's language is not Python's: values have no types before they are traced.

import triton
import triton.language as tl


@triton.jit
def local_expert_or_end(experts, rows, num_rows, num_experts):
    """The expert of each of `rows`; `num_experts` for a remote expert, and beyond the last row."""
    ids = tl.load(experts + rows, mask=rows < num_rows, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def route(
    experts, order, table, num_rows, num_experts,
    BINS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sort rows by expert, one program for each: all count all rows, and each places those of its expert. BINS >
    num_experts."""
    if PDL:
        # The first GEMM may be launched: it waits by itself until all of this grid is written.
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_rows, BLOCK):
        counts += tl.histogram(local_expert_or_end(experts, start + lanes, num_rows, num_experts), BINS)
    counts = tl.where(bins < num_experts, counts, 0)
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    tiles = (counts + (BLOCK_M - 1)) // BLOCK_M
    tile = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    all_tiles = tl.sum(tiles, 0)
    if expert == 0:
        tl.store(table, all_tiles)
        tl.store(table + 1, 0)
    if count > 0:
        seen = first
        for start in range(0, num_rows, BLOCK):
            rows = start + lanes
            mine = local_expert_or_end(experts, rows, num_rows, num_experts) == expert
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
            counts_at = table + (all_tiles + 1) * 4 + tile + at
            tl.store(counts_at, tl.zeros([BINS], tl.int32), mask=at < num_tiles)
