"""Time of attention: `softmax(q @ k^T * scale + mask) @ v` as one kernel that never writes the scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import log

from weaveopt.cost_model.curve import interpolate_rate
from weaveopt.cost_model.gemm import num_waves
from weaveopt.cost_model.kernel_curve import kernel_curve_us
from weaveopt.cost_model.kernels import traffic_us
from weaveopt.cost_model.machine import AttentionCosts, KernelCurve, Machine, kernel_name
from weaveopt.cost_model.timed import KernelShape
from weaveopt.cost_model.uncertainty import estimated, read
from weaveopt.records.price import STAND_IN, Price, PriceSource
from weaveopt.records.site import DTYPE_BYTES

ATTENTION_EFFICIENCY: dict[tuple[str, str], float] = {
    ("cuda", "bfloat16"): 0.60,
    ("cuda", "float16"): 0.60,
    # The CPU kernel multiplies in float32 blocks whatever the dtype: 80 GFLOP/s a core in both.
    ("cpu", "bfloat16"): 0.19,
    ("cpu", "float16"): 0.19,
    ("cpu", "float32"): 0.80,
}
"""Share of the rate of a plain GEMM that attention reaches, by device and dtype, where the profile has no curve.

CUDA: FlashAttention-class kernels without a mask tensor. CPU: measured on one core, head sizes of 64.
"""
OTHER_EFFICIENCY = 0.50
OWN_KERNELS = frozenset({"masked", "paged"})
"""Kernels of this package, of which no constant of a library's says anything."""
MASK_FACTOR = 0.65
"""Remaining share of that rate on CUDA if the kernel adds a mask tensor (cuDNN with a bias: 260 of 700 TFLOP/s).

Like the efficiencies, a fact of the library's kernels and no machine's: it stands for GPUs of which no attention was
measured. `weaveopt calibrate` measures it with and without a mask tensor (`step_us`, `causal_step_us` of a profile).
"""


@dataclass(frozen=True)
class Attention:
    """`q[batch, heads, q_len, head_dim]` against `k[batch, kv_heads, kv_len, head_dim]` and `v[..., value_dim]`."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str
    causal: bool = False
    """The kernel itself skips what a causal mask hides; a mask that comes as a tensor hides nothing from it."""
    mask_bytes: int = 0
    """Size of the mask tensor; 0 without one."""
    window: int = 0
    """With `causal`: how many keys a query reads at most; 0: all before it."""
    value_dim: int = 0
    """Head size of the values; 0: `head_dim`."""
    kernel: str = "sdpa"
    """Which kernel, as curves of profiles name it; `sdpa`: whatever compiled models get of the library."""

    @property
    def form(self) -> str:
        """`decode` (one query a head), else `causal`, `masked` or `full`: the second word of a curve's variant."""
        if self.q_len == 1:
            return "decode"
        return "causal" if self.causal else ("masked" if self.mask_bytes else "full")

    @property
    def mean_head(self) -> float:
        """Mean head size of its two GEMMs."""
        return (self.head_dim + (self.value_dim or self.head_dim)) / 2

    @property
    def flops(self) -> float:
        """`4 · batch · heads · q_len · kv_len · mean_head`; with `causal`, of the visible scores only."""
        visible = self.q_len * self.kv_len
        if self.causal:
            # Query i of the last `seen` ones sees `kv_len - seen + i + 1` keys.
            seen = min(self.q_len, self.kv_len)
            visible = seen * self.kv_len - seen * (seen - 1) // 2
            if self.window:
                visible = min(visible, seen * self.window)
        return 4.0 * self.batch * self.heads * visible * self.mean_head

    @property
    def num_bytes(self) -> int:
        """Queries, keys and values read once, the result written, and the mask."""
        rows = 2 * self.heads * self.q_len + 2 * self.kv_heads * self.kv_len
        return int(self.batch * rows * self.mean_head) * DTYPE_BYTES[self.dtype] + self.mask_bytes


REFERENCE_HEAD = 128
"""Head size of the steps that profiles hold."""
TILE = 128
"""Queries, and keys, of a step in curves that count `steps`."""


def steps(attention: Attention, units: int) -> int:
    """How many tiles of keys the busiest of `units` processors goes through, `TILE` queries at a time.

    Tiles of queries run in waves; where the kernel skips what is hidden they differ, the longest start first, and the
    work spreads evenly.
    """
    tiles = attention.batch * attention.heads
    rows, columns = -(-attention.q_len // TILE), -(-attention.kv_len // TILE)
    if not attention.causal:
        return num_waves(tiles * rows, units) * columns
    before = attention.kv_len - attention.q_len
    lengths = []
    for row in range(rows):
        last = before + min((row + 1) * TILE, attention.q_len)
        first = max(before + row * TILE - attention.window + 1, 0) if attention.window else 0
        lengths.append(max(-(-last // TILE) - first // TILE, 1))
    return max(-(-tiles * sum(lengths) // units), *lengths)


def attention_us(machine: Machine, attention: Attention) -> float:
    """Microseconds of one attention on one rank: a launch, and the larger of its arithmetic and its traffic.

    Where the profile has a curve of the kernel in this form, that curve, by `steps` or by bytes of keys and values.
    Else, where it has measured attention as compiled models call it, the arithmetic is `waves · steps · step_us`:
    tiles of queries in waves, each with a loop over tiles of keys, whatever is masked. Else it runs at
    `ATTENTION_EFFICIENCY` of a GEMM's rate: at full waves, or on machines without waves at `q_len` rows. The traffic
    runs at the memory's bandwidth (decode: reading keys and values). 0 where it is empty. A kernel that was timed at
    this shape takes what was timed.
    """
    if attention.flops <= 0:
        return 0.0
    return machine.timed.us(shape_of(attention), lambda size: _by_profile(machine, sized(attention, size)))


ATTENTION = "attention"
"""First word of the kernels among those that are timed."""


def shape_of(attention: Attention) -> KernelShape:
    """The kernel as it is timed; decode grows with the sequences, all else with the queries and their keys."""
    scores = attention.batch * attention.q_len * attention.kv_len
    mask_item_bytes = -(-attention.mask_bytes // scores)
    heads = (attention.heads, attention.kv_heads, attention.head_dim, attention.value_dim or attention.head_dim)
    fixed = (*heads, attention.window, mask_item_bytes)
    kernel = f"{ATTENTION} {attention.kernel} {attention.form}"
    if attention.q_len == 1:
        return KernelShape(kernel, attention.dtype, attention.batch, (*fixed, attention.kv_len))
    before = attention.kv_len - attention.q_len
    return KernelShape(kernel, attention.dtype, attention.q_len, (*fixed, before, attention.batch))


def attention_of(shape: KernelShape) -> Attention:
    """The attention that `shape_of` gives this shape."""
    _, kernel, form = shape.kernel.split()
    heads, kv_heads, head_dim, value_dim, window, mask_item_bytes, *others = shape.rest
    is_decode = form == "decode"
    batch, queries = (shape.size, 1) if is_decode else (others[1], shape.size)
    keys = others[0] if is_decode else others[0] + queries
    return Attention(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=queries,
        kv_len=keys,
        head_dim=head_dim,
        dtype=shape.dtype,
        causal=form == "causal",
        mask_bytes=batch * queries * keys * mask_item_bytes,
        window=window,
        value_dim=value_dim,
        kernel=kernel,
    )


def sized(attention: Attention, size: int) -> Attention:
    """The attention whose shape has another size."""
    if attention.q_len == 1:
        return replace(attention, batch=size, mask_bytes=attention.mask_bytes * size // attention.batch)
    keys = max(attention.kv_len - attention.q_len + size, 1)
    scores = attention.q_len * attention.kv_len
    return replace(attention, q_len=size, kv_len=keys, mask_bytes=attention.mask_bytes * size * keys // scores)


def _by_profile(machine: Machine, attention: Attention) -> float:
    curve = curve_of(machine, attention)
    if curve is not None:
        return _curve_us(machine, curve, attention)
    if attention.kernel in OWN_KERNELS and machine.timed.has(shape_of(attention)):
        # Nothing but its own times says what it takes, as on GPUs without a profile.
        return Price.read(_by_model(machine, attention), STAND_IN, 1.0, PriceSource.ESTIMATED)
    return _by_model(machine, attention)


def _by_model(machine: Machine, attention: Attention) -> float:
    if machine.attention is not None and attention.dtype in ("bfloat16", "float16"):
        us = _measured_us(machine.attention, attention)
        return read(machine, machine.attention.origin, us, attention)
    rate = _gemm_rate(machine, attention.dtype, attention.q_len)
    rate *= ATTENTION_EFFICIENCY.get((machine.device, attention.dtype), OTHER_EFFICIENCY)
    if attention.mask_bytes and machine.device == "cuda":
        rate *= MASK_FACTOR
    arithmetic_us = attention.flops / rate * 1e6
    us = machine.memory.floor_us + max(arithmetic_us, float(traffic_us(machine, attention.num_bytes)))
    return estimated(machine, us, attention)


def has_time(machine: Machine, attention: Attention) -> bool:
    """True if the profile has a curve of this kernel in this form, or if it was timed."""
    return curve_of(machine, attention) is not None or machine.timed.has(shape_of(attention))


def curve_of(machine: Machine, attention: Attention) -> KernelCurve | None:
    """The measured curve of this kernel in this form, of the head size nearest to this one."""
    if attention.dtype not in ("bfloat16", "float16"):
        return None
    curves = _curves(machine.untimed, attention.kernel, attention.form)
    if not curves:
        return None
    return min(curves, key=lambda curve: abs(log(_head_of(curve) / attention.mean_head)))


@cache
def _curves(machine: Machine, kernel: str, form: str) -> tuple[KernelCurve, ...]:
    named = f"{kernel} {form}"
    return tuple(each for each in machine.kernels if each.op == "attention" and kernel_name(each.variant) == named)


def _head_of(curve: KernelCurve) -> int:
    words = dict(word.split("=") for word in curve.variant.split() if "=" in word)
    return int(words.get("head_dim", REFERENCE_HEAD))


def _curve_us(machine: Machine, curve: KernelCurve, attention: Attention) -> float:
    if curve.counts == "bytes":
        return kernel_curve_us(machine, curve, attention.num_bytes)
    units = machine.attention.units if machine.attention is not None else 1
    us = kernel_curve_us(machine, curve, steps(attention, units) * attention.mean_head / _head_of(curve))
    heads = sorted({_head_of(each) for each in _curves(machine, attention.kernel, attention.form)})
    if attention.mean_head in heads:
        return us
    # Steps are taken to grow with the head; that they do not grow at all is as little known.
    off = bool(machine.relative_error) * abs(log(attention.mean_head / _head_of(curve))) / 2.0
    return us.with_error(("head_dim", curve.variant, attention.mean_head), lambda: off, PriceSource.INTERPOLATED)


def _measured_us(costs: AttentionCosts, attention: Attention) -> float:
    tiles = attention.batch * attention.heads * -(-attention.q_len // costs.tile_q)
    step_us = costs.causal_step_us if attention.causal else costs.step_us
    steps = num_waves(tiles, costs.units) * -(-attention.kv_len // costs.tile_kv)
    # A single query fills no tile: what is read for it bounds it, through all units together.
    arithmetic_us = steps * step_us * attention.mean_head / REFERENCE_HEAD if attention.q_len > 1 else 0.0
    return costs.launch_us + max(arithmetic_us, attention.num_bytes / costs.bytes_per_s * 1e6)


def _gemm_rate(machine: Machine, dtype: str, rows: int) -> float:
    by_dtype = {costs.dtype: costs for costs in machine.gemms}
    costs = by_dtype.get(dtype) or by_dtype.get("bfloat16") or machine.gemms[0]
    if costs.tiles:
        return max(tile.flops_per_s for tile in costs.tiles)
    return interpolate_rate(costs.rates, rows)
