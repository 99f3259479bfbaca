"""The Triton kernel of `weave::paged_attention`; scores, splits and `combine` as in `ops.attention.kernels`."""

# mypy: ignore-errors
# Triton's language is not Python's: values have no types before they are traced.

import triton
import triton.language as tl


@triton.jit
def index_of(read_index, positions, inside, READ: tl.constexpr):
    """Rows of the cache at packed positions; the positions themselves where only new rows are read."""
    if READ == 0:
        return positions.to(tl.int64)
    return tl.load(read_index + positions, mask=inside, other=0)


@triton.jit
def rows_of(stored, new, columns, index, new_rows, is_new, inside, stride_row, stride_new, filled, READ: tl.constexpr):
    """Rows `index` of the cache, or of the new ones where `is_new`; zeros where not `inside`.

    READ: 0 new rows alone, 1 the cache alone, 2 both. Index, masks and columns broadcast to the block."""
    if READ == 0:
        return tl.load(new + index * stride_new + columns, mask=inside & filled, other=0.0)
    kept = tl.load(stored + index * stride_row + columns, mask=inside & filled & (is_new == 0), other=0.0)
    if READ == 2:
        fresh = tl.load(new + new_rows * stride_new + columns, mask=inside & filled & is_new, other=0.0)
        kept = tl.where(is_new, fresh, kept)
    return kept


@triton.jit
def next_block(
    q_rows, m, total, acc, index, stored_k, stored_v, new_k, new_v, read_index, begin_k, ids, end, first_new, last,
    sizes, sentinel, window, stride_row, stride_kn, stride_vn, unit, cap_rate,
    D: tl.constexpr, BLOCK_N: tl.constexpr, READ: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One block of a request's keys, `ids`, whose rows are at `index`: maximum, sum and product so far, the next index.

    Without MASKED every row admits all of them."""
    inside = ids < end
    # A block ahead: the rows' addresses are known when their turn comes.
    ahead = ids + BLOCK_N
    index_next = index_of(read_index, begin_k + ahead, ahead < end, READ)
    is_new = inside & (index == sentinel)
    new_rows = (first_new + ids).to(tl.int64)
    k = rows_of(
        stored_k, new_k, sizes[:, None], index[None, :], new_rows[None, :], is_new[None, :], inside[None, :],
        stride_row, stride_kn, (sizes < D)[:, None], READ,
    )  # fmt: skip
    scores = tl.dot(q_rows, k)
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1), without overflow at either end.
        scores = 1.0 - 2.0 / (tl.exp2(scores * cap_rate) + 1.0)
    if MASKED:
        admitted = inside[None, :] & (ids[None, :] <= last[:, None])
        if WINDOW:
            admitted = admitted & (ids[None, :] > last[:, None] - window)
        scores = tl.where(admitted, scores, float("-inf"))
    m_next = tl.maximum(m, tl.max(scores, 1) * unit)
    # A row that nothing was admitted to yet: 2^(-inf - -inf) would be NaN.
    m_used = tl.where(m_next == float("-inf"), 0.0, m_next) if MASKED else m_next
    probabilities = tl.exp2(scores * unit - m_used[:, None])
    decay = tl.exp2(m - m_used)
    total = total * decay + tl.sum(probabilities, 1)
    v = rows_of(
        stored_v, new_v, sizes[None, :], index[:, None], new_rows[:, None], is_new[:, None], inside[:, None],
        stride_row, stride_vn, (sizes < D)[None, :], READ,
    )  # fmt: skip
    acc = tl.dot(probabilities.to(v.dtype), v, acc * decay[:, None])
    return m_next, total, acc, index_next


@triton.jit(do_not_specialize=["num_queries", "num_requests", "num_splits", "window", "sentinel"])
def paged_attention(
    q, stored_k, stored_v, new_k, new_v, read_index, bounds_q, bounds_k, sinks, out, partial_acc, partial_ml,
    stride_qh, stride_qs, stride_row, stride_head, stride_kn, stride_knh, stride_vn, stride_vnh, stride_oh, stride_os,
    num_queries, num_requests, group, sentinel, window, unit, cap_rate, num_splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, READ: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr, STEP: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_Q queries of one request, of all heads that read one key head, over one split of their keys.

    Row r of a tile is query r // group of head r % group. Request i begins at tile `bounds_q[i] // BLOCK_Q + i`, so
    that the number of tiles does not depend on lengths: grid (S // BLOCK_Q + requests + 1, key heads, num_splits), and
    tiles that no request has end at once. Queries after the last request are one more request, without keys.
    """
    if PDL:
        # `combine` may be launched: it waits by itself until all of this grid is written.
        tl.extra.cuda.gdc_launch_dependents()
    tile, key_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ids = tl.arange(0, BLOCK_R)
    starts = tl.load(bounds_q + ids, mask=ids <= num_requests, other=0)
    request = tl.sum(((ids <= num_requests) & (starts // BLOCK_Q + ids <= tile)).to(tl.int32), 0) - 1
    following = tl.minimum(request + 1, num_requests)
    is_request = request < num_requests
    begin_q, begin_k = tl.load(bounds_q + request), tl.load(bounds_k + request)
    end_q = tl.where(is_request, tl.load(bounds_q + following), num_queries)
    count_q, count_k = end_q - begin_q, tl.load(bounds_k + following) - begin_k
    first_query = (tile - begin_q // BLOCK_Q - request) * BLOCK_Q
    if first_query >= count_q:
        return

    row_ids = tl.arange(0, BLOCK_M)
    queries = first_query + row_ids // group
    heads = key_head * group + row_ids % group
    there = (row_ids < BLOCK_Q * group) & (queries < count_q)
    packed = begin_q + tl.where(there, queries, 0)
    last = count_k - count_q + queries
    end = tl.minimum(count_k - count_q + tl.minimum(first_query + BLOCK_Q, count_q), count_k)
    begin = 0
    if WINDOW:
        begin = tl.maximum(count_k - count_q + first_query - window + 1, 0)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), STEP), num_splits) * STEP
        begin += split * share
        end = tl.minimum(end, begin + share)

    sizes = tl.arange(0, BLOCK_D)
    q_here = q + packed.to(tl.int64)[:, None] * stride_qs + heads.to(tl.int64)[:, None] * stride_qh + sizes[None, :]
    q_rows = tl.load(q_here, mask=there[:, None] & (sizes < D)[None, :], other=0.0)
    stored_k += key_head.to(tl.int64) * stride_head
    stored_v += key_head.to(tl.int64) * stride_head
    new_k += key_head.to(tl.int64) * stride_knh
    new_v += key_head.to(tl.int64) * stride_vnh

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS and not SPLIT:
        m = tl.load(sinks + heads, mask=there, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        total = tl.where(m > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    key_ids = tl.arange(0, BLOCK_N)
    index = index_of(read_index, begin_k + begin + key_ids, begin + key_ids < end, READ)
    # The last keys of a request are its queries' own.
    first_new = begin_q - (count_k - count_q)
    whole = begin
    if INNER:
        # Keys up to the tile's first query are admitted by all of its rows.
        whole += tl.maximum(tl.minimum(count_k - count_q + first_query + 1, end) - begin, 0) // BLOCK_N * BLOCK_N
        for start in range(begin, whole, BLOCK_N):
            m, total, acc, index = next_block(
                q_rows, m, total, acc, index, stored_k, stored_v, new_k, new_v, read_index, begin_k, start + key_ids,
                end, first_new, last, sizes, sentinel, window, stride_row, stride_kn, stride_vn, unit, cap_rate,
                D, BLOCK_N, READ, False, WINDOW, SOFTCAP,
            )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        m, total, acc, index = next_block(
            q_rows, m, total, acc, index, stored_k, stored_v, new_k, new_v, read_index, begin_k, start + key_ids, end,
            first_new, last, sizes, sentinel, window, stride_row, stride_kn, stride_vn, unit, cap_rate,
            D, BLOCK_N, READ, True, WINDOW, SOFTCAP,
        )  # fmt: skip

    kept = there[:, None] & (sizes < D)[None, :]
    if SPLIT:
        num_rows = num_queries * group
        row = key_head.to(tl.int64) * num_rows + packed * group + row_ids % group
        at = row * num_splits + split
        tl.store(partial_ml + at * 2, m, mask=there)
        tl.store(partial_ml + at * 2 + 1, total, mask=there)
        # A split without keys leaves only that: its sums are not read.
        tl.store(partial_acc + at[:, None] * D + sizes[None, :], acc, mask=kept & (m > float("-inf"))[:, None])
    else:
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        out_here = out + packed.to(tl.int64)[:, None] * stride_os + heads.to(tl.int64)[:, None] * stride_oh
        tl.store(out_here + sizes[None, :], result.to(out.dtype.element_ty), mask=kept)
