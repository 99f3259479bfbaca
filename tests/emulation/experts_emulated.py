"""The native GEMMs of `moe_experts` compiled for the CPU, on an emulated cluster (`tests/emulation/gpu/`), in bf16."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

from tests.emulation import emulated_build
from tests.emulation.emulated_build import EMULATED
from tests.graphs import experts_routing
from tests.graphs.experts_routing import plain
from weaveopt import _native
from weaveopt.ops.experts.call import ExpertsCall
from weaveopt.ops.experts.expert_ranges import MAX_RANGES, StackedWeight, tensors_of
from weaveopt.ops.experts.hopper import activation_number
from weaveopt.ops.experts.library import combine
from weaveopt.ops.experts.shapes import ExpertOperands, ExpertsShape, checked_shape

Tensor = torch.Tensor

FIRST_WIDE, SECOND_WIDE = 1, 2
POISON = -777.0
"""In results before a call."""


class NativeCall(ctypes.Structure):
    """`Call` of the library."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p * MAX_RANGES),
        ("gate_up_bias", ctypes.c_void_p),
        ("down", ctypes.c_void_p * MAX_RANGES),
        ("down_bias", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("order", "table", "inner", "results", "gathered")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int64 * MAX_RANGES) for name in ("gate_up_experts", "down_experts")),
        *((name, ctypes.c_int64) for name in ("hidden", "inner_width", "x_stride")),
        *((name, ctypes.c_int32) for name in ("choices", "group", "gated", "interleaved", "activation")),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("transposed", ctypes.c_int32),
        ("num_sms", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("tile_rows", ctypes.c_int32),
        ("second_wide", ctypes.c_int32),
        ("rows_per_buffer", ctypes.c_int64),
        ("lag", ctypes.c_int32),
        ("resident", ctypes.c_int32),
        ("counts_are_ignored", ctypes.c_int32),
    )


def library(name: str = "moe_experts") -> ctypes.CDLL:
    """Compiled library of a source in `tests/emulation/gpu`; its function `run` returns a message if it failed."""
    return emulated_build.library((EMULATED / f"{name}.cpp",), (EMULATED,), flags=("-O2",))


def routed(experts: Tensor, shape: ExpertsShape, tile_rows: int) -> tuple[Tensor, Tensor]:
    """`order` and `table` as the routing kernels leave them; what they do not write is beyond every row."""
    own, tiles = plain(experts, shape.experts, tile_rows)
    order = torch.full((shape.rows,), experts_routing.POISON, dtype=torch.int32)
    order[: len(own)] = own
    counts = torch.zeros((-(-len(tiles) // 4), 4), dtype=torch.int32)
    return order, torch.cat([torch.tensor([[len(tiles), 0, -1, -1]], dtype=torch.int32), tiles, counts])


def cut_tile(begin: int, first: int, end: int) -> list[tuple[int, int]]:
    """First position and count of each CTA's rows, of the tile at `first` of an expert's rows from `begin` to `end`."""
    out = (ctypes.c_int32 * 4)()
    library().cut_tile(begin, first, end, out)
    return [(out[0], out[1]), (out[2], out[3])]


def lagged_items(tiles: int, group: int, columns: tuple[int, int], lag: int) -> list[tuple[bool, int, int]]:
    """Items of both GEMMs in one kernel's order, `columns` of each: whether of the second one, tile, and column."""
    out = (ctypes.c_int32 * (3 * tiles * sum(columns)))()
    library().lagged_items(tiles, group, *columns, lag, out)
    return [(bool(out[at]), out[at + 1], out[at + 2]) for at in range(0, len(out), 3)]


@dataclass(frozen=True)
class OneKernel:
    """How both GEMMs run in one kernel."""

    lag: int = 1
    """Items of the first GEMM for each cluster."""
    resident: int = 8
    """Clusters that run at a time."""
    counts_are_ignored: bool = False
    """True if rows between the GEMMs are read without waiting for them: a mistake."""


def rows_of(
    operands: ExpertOperands,
    call: ExpertsCall,
    num_sms: int,
    seed: int,
    group: int,
    num_buffers: int = 0,
    wide: int = 0,
    one: OneKernel | None = None,
) -> tuple[Tensor, Tensor]:
    """Results of both GEMMs, for contiguous weights or transposed ones: `inner` by position, `results` by row; the rest
    is `POISON`. `num_buffers`: the number of result buffers, all of equally many rows. `wide`: the wide GEMMs,
    `FIRST_WIDE` or `SECOND_WIDE` or both. `one`: both GEMMs run in one kernel."""
    shape = checked_shape(operands, call)
    tile_rows = _native.WIDE_EXPERT_TILE_ROWS if wide else _native.EXPERT_TILE_ROWS
    order, table = routed(operands.experts, shape, tile_rows)
    inner = torch.full((shape.rows, shape.inner), POISON, dtype=torch.bfloat16)
    results = torch.full((shape.rows, shape.hidden), POISON, dtype=torch.bfloat16)
    gathered = torch.full((shape.rows, shape.hidden), math.nan, dtype=torch.bfloat16) if wide & FIRST_WIDE else None

    def at(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    def addresses(weight: StackedWeight) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * MAX_RANGES)(*(each.data_ptr() for each in tensors_of(weight)))

    def counts(weight: StackedWeight) -> ctypes.Array[ctypes.c_int64]:
        return (ctypes.c_int64 * MAX_RANGES)(*(len(each) for each in tensors_of(weight)))

    asked = NativeCall(
        at(operands.x), addresses(operands.gate_up), at(operands.gate_up_bias), addresses(operands.down),
        at(operands.down_bias), at(order), at(table), at(inner), at(results), at(gathered),
        shape.rows, counts(operands.gate_up), counts(operands.down), shape.hidden, shape.inner, operands.x.stride(0),
        shape.choices, group, call.gated, call.interleaved, activation_number(call.activation),
        call.alpha, call.limit, operands.gate_up.stride(2) != 1, num_sms, seed, tile_rows,
        bool(wide & SECOND_WIDE),
        shape.rows // num_buffers if num_buffers else 0,
        -1 if one is None else one.lag, 0 if one is None else one.resident, one is not None and one.counts_are_ignored,
    )  # fmt: skip
    wrong = library().run(ctypes.byref(asked)).decode()
    assert not wrong, wrong
    if num_buffers:
        assert shape.rows % num_buffers == 0, f"{shape.rows} rows at {num_buffers} result buffers"
        results = results.view(num_buffers, -1, shape.hidden).flip(0).reshape(results.shape)
    return inner, results


def emulated(
    operands: ExpertOperands,
    call: ExpertsCall,
    num_sms: int = 4,
    seed: int = 0,
    group: int = 2,
    wide: int = 0,
    one: OneKernel | None = None,
) -> Tensor:
    """`weave::moe_experts` by these GEMMs and the CPU's sum; asserts that nothing but own rows was written."""
    shape = checked_shape(operands, call)
    inner, results = rows_of(operands, call, num_sms, seed, group, wide=wide, one=one)
    own = (operands.experts >= 0) & (operands.experts < shape.experts)
    assert (inner[int(own.sum()) :] == POISON).all(), "rows behind the last expert's were written"
    assert (results[~own.flatten()] == POISON).all(), "rows of foreign choices were written"
    return combine(results.view(shape.tokens, shape.choices, shape.hidden), operands, own)
