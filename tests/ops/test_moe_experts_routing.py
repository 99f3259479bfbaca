"""The native kernels that sort rows by expert: their code on emulated CTAs, against a stable sort."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from tests.emulation import binary
from tests.emulation.experts_emulated import library
from tests.graphs.experts_routing import EXPERTS, POISON, ROWS, TILE_ROWS, assert_sorted, cases, empty_table
from tests.graphs.nonempty import some
from weaveopt import _native

Tensor = torch.Tensor

STEP = 1024
"""Rows that a CTA sorts at a time."""


def routed(experts: Tensor, num_experts: int, tile_rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`order` and `table` by the emulated kernels."""
    num_rows = len(experts)
    order = torch.full((num_rows,), POISON, dtype=torch.int32)
    table = empty_table(num_rows, num_experts, tile_rows)
    wrong: bytes = library("expert_routing").run(
        ctypes.c_void_p(experts.data_ptr()), ctypes.c_int64(num_rows), num_experts, tile_rows,
        ctypes.c_void_p(order.data_ptr()), ctypes.c_void_p(table.data_ptr()), seed,
    )  # fmt: skip
    assert not wrong, wrong.decode()
    return order, table


def check(experts: Tensor, num_experts: int, tile_rows: int, seed: int = 0) -> None:
    order, table = routed(experts, num_experts, tile_rows, seed)
    assert_sorted(order, table, experts, num_experts, tile_rows)


@pytest.mark.parametrize("num_rows", [rows for rows in ROWS if rows <= 5 * STEP])
def test_rows_of_a_few_steps(num_rows: int) -> None:
    """One CTA alone, and several whose last one has few rows; by every kernel, with tiles of every size."""
    tile_rows = itertools.cycle(TILE_ROWS)
    for num_experts in some(EXPERTS):
        for seed, (_, experts) in enumerate(some(cases(num_rows, num_experts))):
            check(experts, num_experts, next(tile_rows), seed)
        next(tile_rows)  # or each case would have a size of its own


@pytest.mark.parametrize(("num_rows", "num_experts"), [(40000, 64), (40000, 200), (40000, 1023), (140000, 8)])
def test_many_rows(num_rows: int, num_experts: int) -> None:
    """With 1023 experts a CTA sorts two steps, as whenever chunks would be more than 128."""
    some = [experts for name, experts in cases(num_rows, num_experts) if name in ("some foreign", "skewed")]
    for experts, tile_rows in zip(some, (256, 16), strict=True):
        check(experts, num_experts, tile_rows)


def test_the_same_in_any_order_of_threads() -> None:
    for name, experts in some(cases(3 * STEP - 5, 100)):
        first = routed(experts, 100, 32)
        for seed in (1000, 2000):
            again = routed(experts, 100, 32, seed)
            assert all(torch.equal(*pair) for pair in zip(some(again), first, strict=True)), name


def test_no_rows_are_no_tiles() -> None:
    _, table = routed(torch.empty(0, dtype=torch.int64), 5, 16)
    assert (table[0, :2] == 0).all() and (table[1:] == POISON).all()


def test_counts_that_each_cta_reads_are_bounded() -> None:
    """A CTA alone counts in its own memory."""
    assert _native.expert_row_counts(STEP, 64) == 0
    assert _native.expert_row_counts(STEP + 1, 64) == 2 * 64
    for num_rows, num_experts in itertools.product((1 << 13, 1 << 17, 1 << 18, (1 << 31) - 1), EXPERTS):
        counts = _native.expert_row_counts(num_rows, num_experts)
        chunks = min(-(-num_rows // STEP), 32 if num_experts > 256 else 128)
        assert chunks // 2 * num_experts < counts <= 1 << 15, (num_rows, num_experts)


@binary.needs_cuda_part
def test_machine_code_waits_for_the_counts_where_the_host_launches_it_early() -> None:
    for architecture in some(binary.for_all_chips()):
        names = [name for name in binary.kernels(architecture) if "rows_by_expert" in name]
        assert len(names) == 8, names
        launched_early = _native.has_sm90_code(binary.number(architecture), binary.number(architecture))
        for name, text in binary.instructions(architecture, names).items():
            assert ("ACQBULK" in text) is (launched_early and "place_rows" in name), f"{architecture}: {name}"
