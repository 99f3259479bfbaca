"""The native GEMMs of `moe_experts`: their code on an emulated cluster, against the plain expression."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.emulation import binary
from tests.emulation.experts_emulated import FIRST_WIDE, SECOND_WIDE, cut_tile, emulated, rows_of
from tests.graphs.experts_cases import CALLS, ROUTINGS, Sizes, expected, make_operands, poisoned
from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt import _native
from weaveopt.errors import WeaveError
from weaveopt.ops.experts import hopper
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel, decode
from weaveopt.ops.experts.reference import reference
from weaveopt.ops.experts.shapes import ExpertOperands, ExpertsShape

BF16 = torch.bfloat16
SILU, PLAIN = CALLS[0], CALLS[3]
SMALL = Sizes(tokens=23, choices=2, experts=3, hidden=72, inner=40, bias=True)
"""Depths of two stages and of one, neither whole; columns that fill no tile."""


WIDE = FIRST_WIDE | SECOND_WIDE
FORMS = pytest.mark.parametrize("wide", [0, WIDE], ids=["halves", "wide"])


def check(
    operands: ExpertOperands,
    call: ExpertsCall,
    what: str,
    num_sms: int = 4,
    seed: int = 0,
    group: int = 2,
    wide: int = 0,
) -> None:
    got = emulated(poisoned(operands), call, num_sms, seed, group, wide)
    assert_close(got, reference(operands, call), KERNEL, what)


@FORMS
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_activation(routing: str, wide: int) -> None:
    for seed, call in enumerate(some(CALLS)):
        operands = make_operands(replace(SMALL, bias=seed % 2 == 0), call, BF16, seed, routing)
        check(operands, call, f"{call} {routing}", seed=seed, wide=wide)
        got = emulated(operands, call, wide=wide)
        assert_close(got, expected(operands, call).to(BF16), KERNEL, f"{call} {routing}")


@FORMS
@pytest.mark.parametrize("counts", [(288, 0, 1), (289, 300), (64, 65, 128), (161, 63), (0, 256, 513), (577,)])
@pytest.mark.parametrize("call", [SILU, PLAIN], ids=["gated", "plain"])
def test_experts_whose_rows_end_anywhere(counts: tuple[int, ...], call: ExpertsCall, wide: int) -> None:
    """Rows end in either panel and either consumer of a tile, and just after one."""
    sizes = Sizes(tokens=sum(counts), choices=1, experts=len(counts), hidden=136, inner=264)
    operands = make_operands(sizes, call, BF16, 1)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    mixed = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))]
    check(replace(operands, experts=mixed[:, None]), call, str(counts), wide=wide)


@FORMS
@pytest.mark.parametrize(("num_sms", "group"), [(2, 1), (3, 4), (6, 2), (20, 8)])
def test_tiles_are_shared_out(num_sms: int, group: int, wide: int) -> None:
    """Among one cluster and more clusters than there are tiles, in groups of any size; an SM may be left over."""
    sizes = Sizes(tokens=330, choices=2, experts=3, hidden=520, inner=136, bias=True)
    operands = make_operands(sizes, SILU, BF16, 3, "skewed")
    check(operands, SILU, f"{num_sms} {group}", num_sms=num_sms, group=group, wide=wide)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("num_buffers", [1, 2, 5, 8])
def test_rows_to_several_ranks(num_buffers: int, transposed: bool) -> None:
    """The bits of rows that go into one tensor, and nothing around them."""
    sizes = Sizes(tokens=200, choices=2, experts=3, hidden=328, inner=72, bias=True, transposed=transposed)
    operands = make_operands(sizes, SILU, BF16, 8, "some_foreign")
    _, together = rows_of(operands, SILU, 4, 0, 2)
    _, apart = rows_of(operands, SILU, 4, 1, 2, num_buffers)
    assert torch.equal(apart, together)


@FORMS
def test_any_order_of_threads_and_copies(wide: int) -> None:
    """More stages than the ring has, so that both parities of each come; the same bits in any order."""
    sizes = Sizes(tokens=200, choices=2, experts=2, hidden=328, inner=392)
    operands = make_operands(sizes, SILU, BF16, 4, "some_foreign")
    first = emulated(operands, SILU, seed=0, wide=wide)
    for seed in range(1, 6):
        assert torch.equal(emulated(operands, SILU, seed=seed * 1000, wide=wide), first), seed
    assert_close(first, reference(operands, SILU), KERNEL)


@FORMS
def test_rows_of_x_may_lie_apart(wide: int) -> None:
    operands = make_operands(SMALL, SILU, BF16, 5)
    apart = torch.full((SMALL.tokens, 104), math.nan, dtype=BF16)
    apart[:, 16:88] = operands.x
    turned = replace(operands, x=apart[:, 16:88])
    assert torch.equal(emulated(turned, SILU, wide=wide), emulated(operands, SILU, wide=wide))


@FORMS
def test_what_is_not_finite_stays_in_its_row(wide: int) -> None:
    operands = make_operands(replace(SMALL, bias=False), SILU, BF16, 6)
    want = emulated(operands, SILU, wide=wide)
    operands.x[4] = math.nan
    got = emulated(operands, SILU, wide=wide)
    others = [row for row in range(SMALL.tokens) if row != 4]
    assert got[4].isnan().all() and torch.equal(got[others], want[others])


@FORMS
def test_no_own_rows_write_nothing(wide: int) -> None:
    operands = make_operands(SMALL, SILU, BF16, 7, "all_foreign")
    inner, results = rows_of(operands, SILU, 4, 0, 2, wide=wide)
    assert inner.unique().numel() == results.unique().numel() == 1
    assert (emulated(operands, SILU, wide=wide) == 0).all()


@pytest.mark.parametrize("wide", [FIRST_WIDE, SECOND_WIDE])
@pytest.mark.parametrize("rows", [*range(1, 258, 16), 256])
def test_every_width_of_a_wide_multiply(rows: int, wide: int) -> None:
    """16 to 256 rows; the other GEMM is the one of halves, on the same tiles."""
    sizes = Sizes(tokens=rows + 3, choices=1, experts=2, hidden=72, inner=72, bias=True)
    operands = make_operands(sizes, SILU, BF16, 1)
    ids = torch.tensor([*[1] * rows, -1, 9, 9])
    mixed = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))]
    check(replace(operands, experts=mixed[:, None]), SILU, str(rows), wide=wide)


@pytest.mark.parametrize("rows", [*range(1, 18), 100, 127, 129, 240, 255, 272, 287, 288])
def test_every_width_of_a_multiply(rows: int) -> None:
    """8 to 144 rows in each of two CTAs; some choices are foreign."""
    sizes = Sizes(tokens=rows + 3, choices=1, experts=2, hidden=72, inner=72, bias=True)
    operands = make_operands(sizes, SILU, BF16, 1)
    ids = torch.tensor([*[1] * rows, -1, 9, 9])
    mixed = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))]
    check(replace(operands, experts=mixed[:, None]), SILU, str(rows))


@pytest.mark.parametrize("seed", range(len(CALLS)))
@pytest.mark.parametrize("bias", [False, True])
def test_weights_whose_rows_lie_side_by_side(seed: int, bias: bool) -> None:
    """As gpt-oss keeps them: gate and up of a column alternate along a row of memory, or not."""
    sizes = replace(SMALL, tokens=40, inner=104, bias=bias, transposed=True)
    operands = make_operands(sizes, CALLS[seed], BF16, seed, "some_foreign")
    check(operands, CALLS[seed], str(CALLS[seed]), seed=seed)


def test_tiles_of_an_expert_are_equally_long() -> None:
    """Up to a multiple of 16; both CTAs of all tiles have every row once."""
    begin, most = 1000, _native.EXPERT_TILE_ROWS
    for rows in range(1, 3000):
        tiles = [cut_tile(begin, first, begin + rows) for first in range(begin, begin + rows, most)]
        found = [position for tile in tiles for first, count in tile for position in range(first, first + count)]
        assert found == list(range(begin, begin + rows)), rows
        lengths = [sum(count for _, count in tile) for tile in tiles]
        assert min(lengths) > 0 and max(lengths) <= most and max(lengths) - rows / len(tiles) < 16, rows
        assert max(count for tile in tiles for _, count in tile) <= most // 2, rows


def test_tiles_of_the_plan_are_those_of_the_kernels() -> None:
    """No routing needs more of them than the table has room for."""
    assert hopper.plan(ExpertsShape(8192, 8, 128, 2048, 768)).rows == _native.EXPERT_TILE_ROWS
    for rows, experts in itertools.product((1, 300, 700), (1, 2, 3)):
        shape = ExpertsShape(rows, 1, experts, 64, 64)
        how = hopper.plan(shape)
        for counts in itertools.product(range(0, rows + 1, 50), repeat=experts):
            if sum(counts) <= rows:
                assert sum(-(-count // how.rows) for count in counts) <= how.max_tiles(shape)


def test_a_call_says_whose_kernels_it_wants() -> None:
    call = replace(SILU, kernels=ExpertsKernel.HOPPER, table=((8, ExpertsKernel.HOPPER), (100, ExpertsKernel.TRITON)))
    assert decode(call.encode()) == call != SILU
    found = [call.kernels_at(tokens) for tokens in (1, 8, 9, 100, 101)]
    assert found == [ExpertsKernel.HOPPER] * 2 + [ExpertsKernel.TRITON] * 2 + [ExpertsKernel.HOPPER]
    for wrong in (((8, "none"),), ((8, ExpertsKernel.TRITON), (8, ExpertsKernel.HOPPER))):
        with pytest.raises(WeaveError):
            decode(replace(call, table=wrong).encode())


def test_without_such_a_gpu_they_take_nothing() -> None:
    operands = make_operands(Sizes(tokens=512, experts=2), SILU, BF16, 1)
    assert hopper.unsupported(operands, ExpertsShape(512, 2, 2, 40, 24))


@binary.needs_cuda_part
def test_machine_code_multiplies_and_copies_asynchronously() -> None:
    if "sm_90a" not in binary.architectures():
        pytest.skip(f"built for {_native.CUDA_ARCHS}: nothing of it runs on Hopper alone")
    names = [name for name in binary.kernels("sm_90a") if "12grouped_gemm" in name]
    assert len(names) == 18, names
    gathering = []
    for name, text in binary.instructions("sm_90a", names).items():
        assert all(f"HGMMA.64x{columns}x16.F32" in text for columns in range(8, 145, 8)), name
        assert "UTMALDG.3D.MULTICAST" in text and "ACQBULK" in text, name
        gathering.append("LDGSTS" in text)
    assert sorted(gathering) == [False] * 8 + [True] * 10


@binary.needs_cuda_part
def test_machine_code_of_wide_multiplies() -> None:
    """No row is gathered, and nothing waits between the multiplies of a stage; with one range of experts or several."""
    if "sm_90a" not in binary.architectures():
        pytest.skip(f"built for {_native.CUDA_ARCHS}: nothing of it runs on Hopper alone")
    names = [name for name in binary.kernels("sm_90a") if "wide_grouped_gemm" in name]
    assert len(names) == 12 and sum("ranged" in name for name in names) == 6, names
    for name, text in binary.instructions("sm_90a", names).items():
        assert all(f"HGMMA.64x{columns}x16.F32" in text for columns in range(16, 257, 16)), name
        assert "UTMALDG.2D.MULTICAST" in text and "ACQBULK" in text and "LDGSTS" not in text, name
