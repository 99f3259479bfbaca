"""The Triton kernels: ranges of keys, attention over a range, and the sum over its splits.

Scores are kept in units of log2, so `exp2` makes probabilities of them. A split leaves `m` (the largest score), `total`
(the sum of probabilities) and `acc` (the sum of values), both of them relative to `m`, in fp32; `combine` adds up:

    m = max(m_s);  out = sum(acc_s * 2^(m_s - m)) / (sum(total_s * 2^(m_s - m)) + 2^(sink - m))
"""

# mypy: ignore-errors
# Triton's language is not Python's: values have no types before they are traced.

import triton
import triton.language as tl

RANGE_ROWS = tl.constexpr(128)


@triton.jit(do_not_specialize=["num_heads"])
def key_ranges(
    mask, out, stride_b, stride_h, stride_s, stride_l, num_heads, num_queries, num_keys, rows,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """One program for a tile's rows and a block of keys.

    `PARTIAL`: stores begin, end, first key that all rows admit, first key after it that some row does not, and first
    key of the block that some row does not; `join_ranges` makes a tile's range of all its blocks. Else there is one
    block, and the range is stored.
    """
    tile, row_of_mask, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = row_of_mask // num_heads, row_of_mask % num_heads
    mask += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    row_end = min((tile + 1) * rows, num_queries)
    nowhere = 2147483647
    ids = block * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    columns = mask + ids.to(tl.int64)[None, :] * stride_l
    # Rows are joined element by element, and across threads once, at the end.
    somes = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.int32)
    everies = tl.full([BLOCK_ROWS, BLOCK_KEYS], 1, tl.int32)
    for row in range(tile * rows, row_end, BLOCK_ROWS):
        row_ids = row + tl.arange(0, BLOCK_ROWS)
        inside = row_ids < row_end
        here = columns + row_ids.to(tl.int64)[:, None] * stride_s
        found = tl.load(here, mask=inside[:, None] & (ids < num_keys)[None, :], other=0)
        admitted = (found != 0).to(tl.int32)
        somes = tl.maximum(somes, admitted)
        # Rows beyond the last query hide nothing.
        everies = tl.minimum(everies, tl.where(inside[:, None], admitted, 1))
    some, whole = tl.max(somes, 0), tl.min(everies, 0) > 0
    first = tl.min(tl.where(some > 0, ids, nowhere), 0)
    end = tl.max(tl.where(some > 0, ids + 1, 0), 0)
    inner_first = tl.min(tl.where(whole, ids, nowhere), 0)
    inner_end = tl.min(tl.where(whole | (ids < inner_first), nowhere, ids), 0)
    at = row_of_mask.to(tl.int64) * tl.num_programs(0) + tile
    if PARTIAL:
        stride = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
        out += at * tl.num_programs(2) + block
        tl.store(out, first)
        tl.store(out + stride, end)
        tl.store(out + 2 * stride, inner_first)
        tl.store(out + 3 * stride, inner_end)
        tl.store(out + 4 * stride, tl.min(tl.where(whole, nowhere, ids), 0))
    else:
        store_range(out + at * 4, first, end, inner_first, inner_end, num_keys)


@triton.jit
def join_ranges(partial, out, stride, num_keys, num_blocks, BLOCK_KEYS: tl.constexpr, BLOCKS: tl.constexpr):
    """One program a tile: the range of what `key_ranges` found in its blocks of keys."""
    tile, blocks = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    partial += tile * num_blocks + blocks
    known, nowhere = blocks < num_blocks, 2147483647
    first = tl.min(tl.load(partial, mask=known, other=nowhere), 0)
    end = tl.max(tl.load(partial + stride, mask=known, other=0), 0)
    inner_first = tl.min(tl.load(partial + 2 * stride, mask=known, other=nowhere), 0)
    inner_end = tl.load(partial + 3 * stride, mask=known, other=nowhere)
    gap = tl.load(partial + 4 * stride, mask=known, other=nowhere)
    begins_in = inner_first // BLOCK_KEYS
    gap = tl.where(blocks == begins_in, inner_end, tl.where(blocks > begins_in, gap, nowhere))
    store_range(out + tile * 4, first, end, inner_first, tl.min(gap, 0), num_keys)


@triton.jit
def store_range(out, first, end, inner_first, inner_end, num_keys):
    """Stores a tile's four numbers; where nothing was found, zeros."""
    none = inner_first == 2147483647
    tl.store(out, tl.where(end > 0, first, 0))
    tl.store(out + 1, end)
    tl.store(out + 2, tl.where(none, 0, inner_first))
    tl.store(out + 3, tl.where(none, 0, min(inner_end, num_keys)))


@triton.jit
def range_of(ranges, stride_t, num_entries, first_query, last_query, num_keys):
    """First, end and the inner range over the entries that the tile's queries are in: at most two.

    Tiles are no longer than an entry. What both of two entries admit wholly may be nothing: its end is below its first.
    """
    one = ranges + min(first_query // RANGE_ROWS, num_entries - 1) * stride_t
    two = ranges + min(last_query // RANGE_ROWS, num_entries - 1) * stride_t
    first_one, end_one = tl.load(one), tl.load(one + 1)
    first_two, end_two = tl.load(two), tl.load(two + 1)
    first_one = tl.where(end_one > 0, first_one, first_two)
    first_two = tl.where(end_two > 0, first_two, first_one)
    inner_first = max(tl.load(one + 2), tl.load(two + 2))
    inner_end = min(tl.load(one + 3), tl.load(two + 3))
    return min(first_one, first_two), min(max(end_one, end_two), num_keys), inner_first, inner_end


@triton.jit
def mask_bytes(mask_rows, key_ids, num_keys, stride_ml, MASK: tl.constexpr):
    """The mask's bytes of these keys: one row of them, or one for each query.

    They are 0 outside of the tile's range anyway. Were it asked for here, each byte would be a load of its own.
    """
    inside = key_ids < num_keys
    offsets = key_ids.to(tl.int64) * stride_ml
    if MASK == 1:
        found = tl.load(mask_rows + offsets, mask=inside, other=0)
    else:
        found = tl.load(mask_rows[:, None] + offsets[None, :], mask=inside[None, :], other=0)
    return found


@triton.jit
def attend_blocks(
    q, acc, m, total, k_blocks, v_blocks, mask_rows, begin, before, resume, after, first, end, num_keys, visible,
    stride_kl, stride_vl, stride_ml, unit, cap_rate,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Goes on over `before` blocks of keys from `begin` on, and `after` ones from `resume` on, in one loop.

    Not CHECKED: every key of them is admitted to every row, else those of [first, end) that the mask admits.
    """
    ids = tl.arange(0, BLOCK_N)
    sizes = tl.arange(0, BLOCK_D)
    value_sizes = tl.arange(0, BLOCK_DV)
    bytes_next = 0
    if MASK != 0 and CHECKED:
        one = tl.where(before > 0, begin, resume)
        bytes_next = mask_bytes(mask_rows, one + ids, num_keys, stride_ml, MASK)
    for at in range(before + after):
        start = tl.where(at < before, begin, resume - before * BLOCK_N) + at * BLOCK_N
        key_ids = start + ids
        inside = (key_ids >= first) & (key_ids < end)
        bytes_here = bytes_next
        if MASK != 0 and CHECKED:
            # A block ahead: bytes are too narrow for copies that the compiler keeps in flight by itself.
            ahead = tl.where(at + 1 < before, begin, resume - before * BLOCK_N) + (at + 1) * BLOCK_N
            bytes_next = mask_bytes(mask_rows, ahead + ids, num_keys, stride_ml, MASK)
        k_here = k_blocks + tl.cast(start, tl.int64) * stride_kl + ids[None, :] * stride_kl + sizes[:, None]
        v_here = v_blocks + tl.cast(start, tl.int64) * stride_vl + ids[:, None] * stride_vl + value_sizes[None, :]
        if CHECKED:
            if D == BLOCK_D:
                k = tl.load(k_here, mask=inside[None, :], other=0.0)
            else:
                k = tl.load(k_here, mask=inside[None, :] & (sizes < D)[:, None], other=0.0)
        else:
            if D == BLOCK_D:
                k = tl.load(k_here)
            else:
                k = tl.load(k_here, mask=(sizes < D)[:, None], other=0.0)
        scores = tl.dot(q, k)
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1), without overflow at either end.
            scores = 1.0 - 2.0 / (tl.exp2(scores * cap_rate) + 1.0)
        if CHECKED:
            admitted = inside[None, :]
            if MASK == 1:
                admitted = (inside & (bytes_here != 0))[None, :]
            if MASK == 2:
                admitted = admitted & (bytes_here != 0)
            if CAUSAL:
                admitted = admitted & (key_ids[None, :] < visible[:, None])
            scores = tl.where(admitted, scores, float("-inf"))
        m_next = tl.maximum(m, tl.max(scores, 1) * unit)
        if CHECKED:
            # A row that nothing was admitted to yet: 2^(-inf - -inf) would be NaN.
            m_used = tl.where(m_next == float("-inf"), 0.0, m_next)
        else:
            m_used = m_next
        probabilities = tl.exp2(scores * unit - m_used[:, None])
        decay = tl.exp2(m - m_used)
        total = total * decay + tl.sum(probabilities, 1)
        acc = acc * decay[:, None]
        if CHECKED:
            # Zeros, not the memory's contents: they may be NaN, and 0 * NaN is.
            if DV == BLOCK_DV:
                v = tl.load(v_here, mask=inside[:, None], other=0.0)
            else:
                v = tl.load(v_here, mask=inside[:, None] & (value_sizes < DV)[None, :], other=0.0)
        else:
            if DV == BLOCK_DV:
                v = tl.load(v_here)
            else:
                v = tl.load(v_here, mask=(value_sizes < DV)[None, :], other=0.0)
        acc = tl.dot(probabilities.to(v.dtype), v, acc)
        m = m_next
    return acc, m, total


@triton.jit(do_not_specialize=["num_heads", "group", "num_entries", "num_splits"])
def attention(
    q, k, v, mask, ranges, sinks, out, partial_acc, partial_ml,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_mb, stride_mh, stride_ms, stride_ml, stride_rb, stride_rh, stride_rt, stride_ob, stride_oh, stride_os,
    num_heads, group, packed, num_queries, num_keys, num_entries, unit, cap_rate, num_splits,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, RANGES: tl.constexpr, SINKS: tl.constexpr,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
    INNER: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M of the rows of `packed` heads that read one key head, over one split of their keys.

    Row r is query r // packed of head r % packed of these heads. Grid (num_splits * bundles * batch, tiles).
    INNER: blocks that hold only admitted keys have a loop of their own, which reads no mask; the others follow.
    A split takes a multiple of STEP keys, so that all are equal at any fill.
    A score is `unit` (> 0) times what the first product gives, or times its tanh where there is a soft cap.
    """
    if PDL:
        # `combine` may be launched: it waits by itself until all of this grid is written.
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0) % num_splits
    bundle = tl.program_id(0) // num_splits
    num_bundles = num_heads // packed
    b = bundle // num_bundles
    first_head = bundle % num_bundles * packed
    # The last queries see most: they go first, so that what is left at the end is short.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    num_rows = num_queries * packed
    row_ids = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.minimum(row_ids, num_rows - 1)
    queries = rows // packed
    heads = first_head + rows % packed
    first_query = tile * BLOCK_M // packed
    last_query = min(tile * BLOCK_M + BLOCK_M - 1, num_rows - 1) // packed

    first, end, inner_first, inner_end = 0, num_keys, 0, num_keys
    if MASK != 0:
        inner_end = 0
    if RANGES:
        of_tile = ranges + b.to(tl.int64) * stride_rb + first_head * stride_rh
        first, end, inner_first, inner_end = range_of(
            of_tile, stride_rt, num_entries, first_query, last_query, num_keys
        )
        if MASK == 0 and num_entries == 1:
            inner_first, inner_end = first, end
    visible = queries + (num_keys - num_queries + 1)
    if CAUSAL:
        end = max(min(end, last_query + num_keys - num_queries + 1), 0)
        inner_end = min(inner_end, first_query + num_keys - num_queries + 1)
    # Aligned, so that mask bytes can be read several at a time.
    begin = first // STEP * STEP
    if SPLIT:
        share = tl.cdiv(tl.cdiv(max(end - begin, 0), STEP), num_splits) * STEP
        begin += split * share
        end = min(end, begin + share)
    blocks = tl.cdiv(max(end - begin, 0), BLOCK_N)

    b64 = b.to(tl.int64)
    key_head = first_head // group
    k += b64 * stride_kb + key_head.to(tl.int64) * stride_kh
    v += b64 * stride_vb + key_head.to(tl.int64) * stride_vh
    sizes = tl.arange(0, BLOCK_D)
    value_sizes = tl.arange(0, BLOCK_DV)
    q_here = q + b64 * stride_qb + queries.to(tl.int64)[:, None] * stride_qs + heads.to(tl.int64)[:, None] * stride_qh
    q_here += sizes[None, :]
    if D == BLOCK_D:
        q_rows = tl.load(q_here)
    else:
        q_rows = tl.load(q_here, mask=(sizes < D)[None, :], other=0.0)
    if MASK == 2:
        mask_rows = mask + b64 * stride_mb + heads.to(tl.int64) * stride_mh + queries.to(tl.int64) * stride_ms
    else:
        mask_rows = mask + b64 * stride_mb + first_head.to(tl.int64) * stride_mh

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS and not SPLIT:
        m = tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634
        total = tl.where(m > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    before, resume, after = blocks, begin, 0
    if INNER:
        skipped = tl.cdiv(max(inner_first - begin, 0), BLOCK_N)
        whole = max((min(inner_end, end) - begin) // BLOCK_N - skipped, 0)
        acc, m, total = attend_blocks(
            q_rows, acc, m, total, k, v, mask_rows, begin + skipped * BLOCK_N, whole, begin, 0, first, end, num_keys,
            visible, stride_kl, stride_vl, stride_ml, unit, cap_rate,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, MASK, CAUSAL, SOFTCAP, False,
        )  # fmt: skip
        before = tl.where(whole > 0, skipped, blocks)
        resume = begin + (skipped + whole) * BLOCK_N
        after = blocks - before - whole
    acc, m, total = attend_blocks(
        q_rows, acc, m, total, k, v, mask_rows, begin, before, resume, after, first, end, num_keys,
        visible, stride_kl, stride_vl, stride_ml, unit, cap_rate,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, MASK, CAUSAL, SOFTCAP, True,
    )  # fmt: skip

    there = row_ids < num_rows
    if SPLIT:
        # [bundle, row, split]: the values that a row's sum reads are contiguous.
        at = (bundle.to(tl.int64) * num_rows + row_ids) * num_splits + split
        tl.store(partial_ml + at * 2, m, mask=there)
        tl.store(partial_ml + at * 2 + 1, total, mask=there)
        # A split without keys leaves only that: its sums are not read.
        written = there & (m > float("-inf"))
        acc_here = partial_acc + at[:, None] * DV + value_sizes[None, :]
        tl.store(acc_here, acc, mask=written[:, None] & (value_sizes < DV)[None, :])
    else:
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        out_here = out + b64 * stride_ob + queries.to(tl.int64)[:, None] * stride_os + heads[:, None] * stride_oh
        out_here += value_sizes[None, :]
        tl.store(out_here, result.to(out.dtype.element_ty), mask=there[:, None] & (value_sizes < DV)[None, :])


@triton.jit(do_not_specialize=["num_heads", "num_splits"])
def combine(
    partial_acc, partial_ml, sinks, out, stride_ob, stride_oh, stride_os, num_heads, packed, num_queries, num_splits,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SPLITS: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_DV columns of a row. Grid (rows of all bundles, ceil(DV / BLOCK_DV))."""
    row = tl.program_id(0)
    num_rows = num_queries * packed
    bundle, row_of_bundle = row // num_rows, row % num_rows
    num_bundles = num_heads // packed
    b = bundle // num_bundles
    head = bundle % num_bundles * packed + row_of_bundle % packed
    query = row_of_bundle // packed
    splits = tl.arange(0, BLOCK_SPLITS)
    columns = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if SINKS:
        m = tl.load(sinks + head + tl.zeros([1], tl.int32)).to(tl.float32) * 1.4426950408889634
        total = tl.where(m > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    at = row.to(tl.int64) * num_splits
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(0, num_splits, BLOCK_SPLITS):
        ids = start + splits
        m_s = tl.load(partial_ml + (at + ids) * 2, mask=ids < num_splits, other=float("-inf"))
        total_s = tl.load(partial_ml + (at + ids) * 2 + 1, mask=ids < num_splits, other=0.0)
        used = m_s > float("-inf")
        acc_here = partial_acc + (at + ids)[:, None] * DV + columns[None, :]
        acc_s = tl.load(acc_here, mask=used[:, None] & (columns < DV)[None, :], other=0.0)
        m_next = tl.maximum(m, tl.max(m_s, 0))
        m_used = tl.where(m_next == float("-inf"), 0.0, m_next)
        decay = tl.exp2(m - m_used)
        weight = tl.exp2(m_s - m_used)
        total = total * decay + tl.sum(total_s * weight, 0)
        acc = acc * decay + tl.sum(acc_s * weight[:, None], 0)
        m = m_next
    result = acc / tl.where(total > 0.0, total, 1.0)
    out += b.to(tl.int64) * stride_ob + query.to(tl.int64) * stride_os + head * stride_oh
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=columns < DV)
