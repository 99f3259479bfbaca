"""The Triton kernels of the experts: both GEMMs over tiles of rows of one expert, and the weighted sum.

A program first finds its tile in the table that the routing kernels wrote (`routing_kernels.py`); programs beyond the
last tile return there. Weights are read in place. If gate and up are two halves, a tile's columns are still gate 0, up
0, gate 1, up 1, ..., by the rows that it reads: so both are in one thread's registers when the activation needs them.
"""

# mypy: ignore-errors
# Triton's language is not Python's: values have no types before they are traced.

import triton
import triton.language as tl


@triton.jit
def cut_above(x, limit):
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activated(gate, ACT: tl.constexpr):
    """fp32 in, fp32 out; ACT is a word of `ActivationName`."""
    if ACT == "silu":
        result = gate * tl.sigmoid(gate)
    elif ACT == "relu":
        result = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "relu_squared":
        result = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        result = result * result
    elif ACT == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(z)) is sigmoid(2 * z).
        result = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return result


@triton.jit
def place_of(pid, num_tiles, num_blocks, GROUP: tl.constexpr):
    """Tile and block of columns of a program: GROUP tiles go through a block's weights before the next block."""
    whole = GROUP * num_blocks
    first = pid // whole * GROUP
    size = min(num_tiles - first, GROUP)
    return first + pid % whole % size, pid % whole // size


@triton.jit
def within(numbers, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Clamp numbers to `SIZE - 1`. Whole blocks are left unclamped: a clamp would make their loads scalar."""
    if SIZE % BLOCK == 0:
        result = numbers
    else:
        result = tl.minimum(numbers, SIZE - 1)
    return result


@triton.jit
def range_of(expert, weight, others, starts):
    """Base address of the range that has `expert`, and the expert's number in it.

    `weight` is the first range; the others begin with the experts `starts`. With one range nothing is computed.
    """
    number = expert
    for i in tl.static_range(len(others)):
        beyond = expert >= starts[i]
        weight = tl.where(beyond, others[i], weight)
        number = tl.where(beyond, expert - starts[i], number)
    return weight, number


@triton.jit
def product(
    acc, rows, columns, depth_first, depth_end, stride_rk, stride_ck,
    BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """`acc + rows @ columns.T` over [depth_first, depth_end) of both; with SWAP its transpose, [columns, rows].

    Tensor cores multiply 64 rows at a time and any multiple of 8 columns: with few tokens the weights are the rows.
    Offsets within one expert's weight are of 32 bits.
    """
    ks = tl.arange(0, BLOCK_K)
    for start in range(depth_first, depth_end, BLOCK_K):
        at = start + ks
        if SWAP:
            left = columns[:, None] + at[None, :] * stride_ck
            right = rows[None, :] + at[:, None] * stride_rk
        else:
            left = rows[:, None] + at[None, :] * stride_rk
            right = columns[None, :] + at[:, None] * stride_ck
        if WHOLE_K:
            a, b = tl.load(left), tl.load(right)
        else:
            inside = start + ks < depth_end
            a = tl.load(left, mask=inside[None, :], other=0.0)
            b = tl.load(right, mask=inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit(do_not_specialize=["choices"])
def gate_up(
    x, order, table, weight, others, starts, bias, inner, stride_xt, stride_we, stride_wn, stride_wk, choices, alpha,
    limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, ACT: tl.constexpr, CUT: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`act(x[token] @ weight[expert].T + bias[expert])` at the row's position, in x's dtype: `inner` [positions, I].

    One program: BLOCK_N columns of a tile, so twice as many rows of the weight where gated. `weight` may be the first
    of several ranges of experts (`range_of`).
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        # The second GEMM may be launched: it waits by itself until all of this grid is written.
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    num_tiles = tl.load(table)
    num_blocks: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    if pid >= num_tiles * num_blocks:
        return
    tile, block = place_of(pid, num_tiles, num_blocks, GROUP)
    expert = tl.load(table + (tile + 1) * 4).to(tl.int64)
    first = tl.load(table + (tile + 1) * 4 + 1)
    end = tl.load(table + (tile + 1) * 4 + 2)
    positions = first + tl.arange(0, BLOCK_M)
    # Beyond the last row: that one again, which is not stored.
    tokens = tl.load(order + tl.minimum(positions, end - 1)) // choices
    rows = x + tokens.to(tl.int64) * stride_xt

    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    LAST: tl.constexpr = 2 * INNER - 1 if GATED else INNER - 1
    numbers = block * WIDTH + tl.arange(0, WIDTH)
    if GATED and not INTERLEAVED:
        numbers = within(numbers // 2, INNER, BLOCK_N) + numbers % 2 * INNER
    else:
        numbers = within(numbers, LAST + 1, WIDTH)
    base, place = range_of(expert, weight, others, starts)
    columns = base + place * stride_we + numbers * stride_wn
    if SWAP:
        acc = tl.zeros([WIDTH, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    acc = product(acc, rows, columns, 0, HIDDEN, 1, stride_wk, BLOCK_K, HIDDEN % BLOCK_K == 0, SWAP)
    if SWAP:
        acc = tl.trans(acc)
    if BIAS:
        acc += tl.load(bias + expert * (LAST + 1) + numbers).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
        if CUT:
            gate = cut_above(gate, limit)
            up = tl.maximum(cut_above(up, limit), -limit, propagate_nan=tl.PropagateNan.ALL)
        if ACT == "clamped_swish":
            result = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
        else:
            result = activated(gate, ACT) * up
    else:
        result = activated(acc, ACT)
    at = block * BLOCK_N + tl.arange(0, BLOCK_N)
    here = inner + positions.to(tl.int64)[:, None] * INNER + at[None, :]
    tl.store(here, result.to(inner.dtype.element_ty), mask=(positions < end)[:, None] & (at < INNER)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def down(
    inner, order, table, weight, others, starts, bias, out, stride_we, stride_wn, stride_wk, num_rows,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, TO_RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`inner @ weight[expert].T + bias[expert]` at the row's number: `out` [SPLITS, rows, H], partial sums in fp32.

    With one split it is in x's dtype. Grid (tiles * blocks, SPLITS). With TO_RANKS `out` are addresses: row n is row
    `n % num_rows` of the n // num_rows-th, and there is one split.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid, split = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.load(table)
    num_blocks: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    if pid >= num_tiles * num_blocks:
        return
    tile, block = place_of(pid, num_tiles, num_blocks, GROUP)
    expert = tl.load(table + (tile + 1) * 4).to(tl.int64)
    first = tl.load(table + (tile + 1) * 4 + 1)
    end = tl.load(table + (tile + 1) * 4 + 2)
    positions = first + tl.arange(0, BLOCK_M)
    there = tl.minimum(positions, end - 1)
    numbers = tl.load(order + there)
    rows = inner + there.to(tl.int64) * INNER

    at = block * BLOCK_N + tl.arange(0, BLOCK_N)
    read = within(at, HIDDEN, BLOCK_N)
    base, place = range_of(expert, weight, others, starts)
    columns = base + place * stride_we + read * stride_wn
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    SHARE: tl.constexpr = ((INNER + BLOCK_K - 1) // BLOCK_K + SPLITS - 1) // SPLITS * BLOCK_K
    depth_end = min((split + 1) * SHARE, INNER)
    acc = product(acc, rows, columns, split * SHARE, depth_end, 1, stride_wk, BLOCK_K, INNER % BLOCK_K == 0, SWAP)
    if SWAP:
        acc = tl.trans(acc)
    if BIAS and split == 0:
        acc += tl.load(bias + expert * HIDDEN + read).to(tl.float32)[None, :]
    if TO_RANKS:
        # Alignment hint: rows begin at multiples of 16 bytes; without it Triton emits scalar stores.
        bases = tl.multiple_of(tl.load(out + numbers // num_rows).to(tl.pointer_type(inner.dtype.element_ty)), 16)
        here = bases[:, None] + (numbers % num_rows).to(tl.int64)[:, None] * HIDDEN + at[None, :]
        result = acc.to(inner.dtype.element_ty)
    else:
        here = out + (split * num_rows.to(tl.int64) + numbers.to(tl.int64))[:, None] * HIDDEN + at[None, :]
        result = acc.to(out.dtype.element_ty)
    tl.store(here, result, mask=(positions < end)[:, None] & (at < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def combine(
    results, experts, weights, y, stride_wt, stride_wk, num_rows, num_experts,
    HIDDEN: tl.constexpr, CHOICES: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine `sum(weights[t, j] * row[t, j])` over this rank's choices in order, in fp32. Grid (tokens, blocks of
    columns).

    A row's splits are added first, and rounded as one split is.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for j in tl.static_range(CHOICES):
        expert = tl.load(experts + token * CHOICES + j)
        own = (expert >= 0) & (expert < num_experts)
        # Rows of remote experts are not written, and their weights may be anything: neither is read.
        weight = tl.load(weights + token * stride_wt + j * stride_wk, mask=own, other=0.0).to(tl.float32)
        here = results + (token * CHOICES + j) * HIDDEN + at
        row = tl.load(here, mask=own & (at < HIDDEN), other=0.0).to(tl.float32)
        if SPLITS > 1:
            for split in tl.static_range(1, SPLITS):
                row += tl.load(here + split * num_rows.to(tl.int64) * HIDDEN, mask=own & (at < HIDDEN), other=0.0)
            row = row.to(y.dtype.element_ty).to(tl.float32)
        acc += weight * row
    tl.store(y + token * HIDDEN + at, acc.to(y.dtype.element_ty), mask=at < HIDDEN)
