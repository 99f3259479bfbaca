"""GEMM, reduction and norm in one kernel that sends tiles as they are finished, between Hopper GPUs; in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model.machine import Curve
from weaveopt.fabrics import topology
from weaveopt.fabrics.arena import transport
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Launch, Sample
from weaveopt.measure.draft import Draft
from weaveopt.measure.fit import never_falling
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import Rows, Session
from weaveopt.ops.gemm_all_reduce.call import GemmReductionCall, WeightLayout
from weaveopt.ops.gemm_all_reduce.cut import OP, TILES, Cut, HandsOut, MeasuredAs
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec
from weaveopt.reductions.buffers import memory_plan
from weaveopt.reductions.call import ReductionCall, SumOut
from weaveopt.reductions.variant import Algorithm, KernelRow, Transfer

DTYPE = torch.bfloat16
ROWS = (2048, 4096, 8192)
"""Elements of a row."""
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
DEPTHS = (512, 2048, 4096, 8192)
"""k of the GEMM: from one that the exchange hides to one that hides the exchange."""
CUTS = (Cut(256, 1, 4), Cut(256, 2, 16))
"""What was fastest of several: where the GEMM is the longer part, and where the exchange is."""
EPS = 1e-5
TIMEOUT_S = 60.0
TAKEN_BYTES_PER_US, TAKEN_FLOPS_PER_US = 2e5, 5e8
"""About what the link and a GEMM do, for how many calls a measurement makes."""


@dataclass(frozen=True)
class Case:
    """One kernel at one size."""

    measured: MeasuredAs
    hidden: int
    tokens: int

    @property
    def bytes(self) -> int:
        return self.tokens * self.hidden * DTYPE.itemsize

    @property
    def guess_us(self) -> float:
        flops = 2.0 * self.tokens * self.hidden * self.measured.depth
        return 10.0 + self.bytes / TAKEN_BYTES_PER_US + flops / TAKEN_FLOPS_PER_US


def cases(quick: bool) -> Iterator[Case]:
    rows, tokens, depths, cuts = (
        (ROWS[1:2], TOKENS[1::3], DEPTHS[::3], CUTS[:1]) if quick else (ROWS, TOKENS, DEPTHS, CUTS)
    )
    for hands_out in HandsOut:
        for cut in cuts:
            for depth in depths:
                for hidden in rows:
                    for count in tokens:
                        yield Case(MeasuredAs(hands_out, cut, depth), hidden, count)


def is_supported(case: Case, ranks: Ranks) -> bool:
    """Whether the device has the kernel; the op would go through the library without a word."""
    from weaveopt import _native

    device, depth = ranks.device.index or 0, case.measured.depth
    return not _native.product_unsupported(_native.DType.bfloat16, case.hidden, depth, ranks.world, device)


def call_of(case: Case, group: str, world: int) -> GemmReductionCall:
    """The op as compiled graphs call it. Normalized rows may lie in the arena, as where only GEMMs read them."""
    normalizes = case.measured.hands_out is HandsOut.NORM
    reduction = ReductionCall(
        site=f"calibrate.{case}", group=group, fabric=Fabric.PEER, world=world, hidden=case.hidden, dtype="bfloat16",
        out_dtype="bfloat16", max_tokens=case.tokens, post=None,
        norm=NormSpec(NormKind.RMS, EPS, cast_before_weight=True) if normalizes else None,
        timeout_s=TIMEOUT_S, residual_sharded=normalizes, sum_out=SumOut.SHARDED if normalizes else SumOut.WHOLE,
        table=(KernelRow(case.tokens, Algorithm.TWO_SHOT, Transfer.TILES),), normalized_aliases_arena=normalizes,
    )  # fmt: skip
    return GemmReductionCall(reduction, TILES, (), case.measured.cut)


def launch(case: Case, ranks: Ranks) -> Launch:
    tokens, hidden, depth, device = case.tokens, case.hidden, case.measured.depth, ranks.device
    rows = [torch.randn(tokens, depth, device=device, dtype=DTYPE) for _ in range(2)]
    weights = [torch.randn(hidden, depth, device=device, dtype=DTYPE) / depth**0.5 for _ in range(2)]
    # The same on all ranks, as a residual is.
    residual = torch.zeros(tokens, hidden, device=device, dtype=DTYPE)
    scale = torch.ones(hidden, device=device, dtype=DTYPE) if case.measured.hands_out is HandsOut.NORM else None
    op, layout = torch.ops.weave.gemm_all_reduce_norm.default, WeightLayout.NK.value
    text = call_of(case, ranks.name, ranks.world).encode()

    def run(index: int) -> object:
        turn = index % 2
        return op(rows[turn], weights[turn], layout, None, None, residual, None, None, scale, None, text)

    return run


@dataclass
class TileKernels(Family):
    """On the fabric `peer`: the whole kernel's time, at each depth of the GEMM."""

    devices: ClassVar = frozenset({"cuda"})
    times: dict[tuple[int, int, MeasuredAs], Rows] = field(default_factory=dict)
    """(bytes, time) by number of ranks, row length and kernel."""

    def measure_together(self, session: Session, ranks: Ranks) -> None:
        every = [case for case in cases(session.quick) if is_supported(case, ranks)]
        if not every:
            return
        # One arena for all that is captured, before any of it is: graphs hold its addresses.
        plan = memory_plan(ranks.name, [call_of(case, ranks.name, ranks.world).reduction for case in every])
        transport(plan.fabric).reserve(topology.discover(ranks.name, TIMEOUT_S), plan, 0, TIMEOUT_S)
        curves: dict[tuple[int, MeasuredAs], list[Case]] = {}
        for case in every:
            curves.setdefault((case.hidden, case.measured), []).append(case)
        for (row, measured), sizes in curves.items():

            def take(index: int, sizes: Sequence[Case] = sizes) -> Sample:
                case = sizes[index]
                return session.clock.together(launch(case, ranks), case.guess_us, ranks.process_group)

            what = f"GEMM and all-reduce of {ranks.world} ranks in tiles"
            self.times[ranks.world, row, measured] = session.curve(what, [each.bytes for each in sizes], take)

    def write(self, draft: Draft) -> None:
        if not self.times:
            return
        what = "GEMM, all-reduce, add and RMSNorm in one kernel, bfloat16"
        origin = draft.origin("tiles", (sample for rows in self.times.values() for _, sample in rows), what)
        for (world, row, measured), rows in self.times.items():
            points = never_falling([(size, sample.us) for size, sample in rows])
            ends = points[0].bytes, points[-1].bytes
            draft.add_curve(Fabric.PEER, Curve(origin, OP, measured.variant, world, points, row, *ends))
