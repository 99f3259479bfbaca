"""`weave::paged_attention` on GPUs: how a call is divided, and its launch. Nothing here waits for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from weaveopt.kernel_memory import shared_bytes
from weaveopt.ops.attention import paged_reference
from weaveopt.ops.attention.gpu import (
    COMBINE_SPLITS,
    LARGEST_HEAD,
    SPLIT_STEP,
    has_triton,
    may_launch_early,
    num_sms,
)
from weaveopt.ops.attention.paged_shapes import PagedOperands
from weaveopt.ops.attention.plan import (
    FEW_ROWS,
    GOOD_ENOUGH,
    LEAST_ROWS,
    LONG_KEYS,
    MAX_SPLITS,
    MIDDLE,
    columns_to_combine,
    fitting,
    power_of_two,
)
from weaveopt.ops.attention.shapes import Scores, empty_result

Tensor = torch.Tensor


SPLIT_KEYS = 1024
"""Keys of a split where there is room for more requests than there are, as far as the host knows."""
FEW_KEYS = 512
"""Keys of a program up to which small blocks, of which more programs are resident, are faster, and one loop over all
blocks is."""
MANY_ROWS = 128
"""Rows of a tile where requests have as many on average: keys are loaded once for all of them."""
MANY_ROWS_WARPS = 8
"""Two groups of four warps, each of which multiplies half of such a tile."""


@dataclass(frozen=True)
class PagedLaunch:
    """One launch: a function of sizes that the host knows, of nothing on the device."""

    block_m: int
    block_q: int
    """Queries of a tile: as many as have all their heads of a group in `block_m` rows."""
    block_n: int
    num_splits: int
    num_warps: int = MIDDLE.num_warps
    num_stages: int = MIDDLE.num_stages
    inner: bool = False
    """Blocks of keys that every row admits have a loop of their own, without a mask."""


def plan_paged(operands: PagedOperands, sms: int) -> PagedLaunch:
    """Tiles of decode are one query's; its keys are split where tiles alone leave SMs idle.

    In CUDA graphs the sizes are those of a larger step: requests without queries are tiles that end at once. How many
    there are at least follows from all keys and the longest request.
    """
    queries, group, requests = operands.query.shape[2], operands.group, operands.num_requests
    key_heads, num_keys = operands.rows.keys.shape[1], operands.rows.num_keys
    is_decode = queries <= requests
    is_wide = operands.query.shape[3] > 128
    is_long = not (is_decode or is_wide) and queries * group >= MANY_ROWS * requests
    block_m = max(LEAST_ROWS if is_decode else MANY_ROWS if is_long else FEW_ROWS, power_of_two(group))
    block_q = block_m // group
    longest = max(min(operands.max_keys, num_keys), 1)
    most_tiles = (queries if is_decode else queries // block_q + requests) * key_heads
    least_tiles = min(-(-num_keys // longest) * key_heads, most_tiles) if is_decode else most_tiles
    mean_keys = num_keys // max(min(queries, requests), 1)

    def busy(tiles: int) -> int:
        filling = 1 if is_long else MIDDLE.filling
        return -(-int(filling * sms) // max(tiles, 1))

    most = max(longest // (2 * MIDDLE.least_keys), 1)
    splits = max(1, min(max(busy(most_tiles), min(busy(least_tiles), longest // SPLIT_KEYS)), most, MAX_SPLITS))
    block_n = MIDDLE.block_n
    if is_decode and GOOD_ENOUGH * sms <= least_tiles == most_tiles <= sms and mean_keys < LONG_KEYS:
        # One program an SM has all keys of its request: it alone keeps enough of them in flight.
        splits, block_n = 1, MIDDLE.block_n if is_wide else 2 * MIDDLE.block_n
    elif (is_decode and most_tiles * splits >= MIDDLE.resident * sms and mean_keys // splits <= FEW_KEYS) or is_wide:
        block_n = MIDDLE.block_n // 2
    num_warps = MANY_ROWS_WARPS if is_long else MIDDLE.num_warps
    return PagedLaunch(block_m, block_q, block_n, splits, num_warps, inner=is_long and longest > FEW_KEYS)


def attend(operands: PagedOperands, scores: Scores) -> Tensor:
    """Attention after the new rows were written, or before where they may replace what is read."""
    query = operands.query
    half = query.dtype in (torch.bfloat16, torch.float16)
    if not (half and query.shape[3] <= LARGEST_HEAD and scores.scale > 0 and scores.softcap >= 0 and has_triton()):
        return paged_reference.dense(operands, scores)
    how, sizes = plan_paged(operands, num_sms(query.device)), (query.shape[3], query.shape[3])
    fit = fitting(how.block_m, how.block_n, how.num_stages, sizes, shared_bytes(query.device))
    if fit is None:
        return paged_reference.dense(operands, scores)
    return launch_paged(operands, scores, replace(how, block_n=fit[0], num_stages=fit[1]))


def launch_paged(operands: PagedOperands, scores: Scores, how: PagedLaunch) -> Tensor:
    """Launches one kernel, and `combine` if keys are split; tensors may be on any device that Triton supports."""
    from weaveopt.ops.attention import kernels, paged_kernels

    rows, group = operands.rows, operands.group
    query, keys, values = (_dense_rows(each) for each in (operands.query, rows.keys, rows.values))
    out = empty_result(query, query)
    if out.numel() == 0:
        return out
    _, heads, queries, size = query.shape
    key_heads, splits = heads // group, how.num_splits
    early = splits > 1 and may_launch_early(out.device)
    acc = ml = out
    if splits > 1:
        acc = out.new_empty((heads * queries, splits, size), dtype=torch.float32)
        ml = out.new_empty((heads * queries, splits, 2), dtype=torch.float32)
    stored_keys, stored_values = rows.stored()
    sinks = query if operands.sinks is None else operands.sinks.contiguous()
    unit, cap_rate = scores.scale * math.log2(math.e), 0.0
    if scores.softcap:
        unit, cap_rate = scores.softcap * math.log2(math.e), 2 * scores.scale / scores.softcap * math.log2(math.e)
    read = (2 if rows.reads_first else 1) if rows.read_index.shape[0] else 0
    requests, block_d = operands.num_requests, power_of_two(max(size, 16))
    paged_kernels.paged_attention[(queries // how.block_q + requests + 1, key_heads, splits)](
        query, stored_keys, stored_values, keys, values, rows.read_index,
        operands.cu_seq_lens_q, operands.cu_seq_lens_k, sinks, out, acc, ml,
        query.stride(1), query.stride(2), *stored_keys.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        out.stride(1), out.stride(2), queries, requests, group, rows.sentinel, operands.window, unit, cap_rate, splits,
        D=size, BLOCK_D=block_d, BLOCK_M=how.block_m, BLOCK_Q=how.block_q, BLOCK_N=how.block_n,
        BLOCK_R=power_of_two(requests + 1), READ=read, WINDOW=operands.window > 0, SINKS=operands.sinks is not None,
        SOFTCAP=scores.softcap > 0, SPLIT=splits > 1, PDL=early, STEP=SPLIT_STEP,
        INNER=how.inner and not operands.window, num_warps=how.num_warps, num_stages=how.num_stages,
    )  # fmt: skip
    if splits > 1:
        columns = min(columns_to_combine(splits), block_d)
        kernels.combine[(heads * queries, -(-size // columns))](
            acc, ml, sinks, out, out.stride(0), out.stride(1), out.stride(2), heads, group, queries, splits,
            DV=size, BLOCK_DV=columns, BLOCK_SPLITS=min(power_of_two(splits), COMBINE_SPLITS),
            SINKS=operands.sinks is not None, PDL=early, num_warps=1, launch_pdl=early,
        )  # fmt: skip
    return out


def _dense_rows(tensor: Tensor) -> Tensor:
    """Elements of a head one after another, as the kernel reads them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
