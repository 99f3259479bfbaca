"""The reduce-scatter behind a GEMM that wrote into shared memory, between CPU ranks; in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model.machine import Curve
from weaveopt.fabrics import topology
from weaveopt.fabrics.arena import transport
from weaveopt.fabrics.rows_call import memory_plan
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Launch, Sample
from weaveopt.measure.draft import Draft
from weaveopt.measure.fit import never_falling
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import Rows, Session
from weaveopt.ops.gemm_reduce_scatter.call import GemmReduceScatterCall
from weaveopt.ops.gemm_reduce_scatter.op import SITES
from weaveopt.records.candidate import Fabric

DTYPE = torch.bfloat16
ROW = 1024
"""Columns; times go by bytes alone."""
DEPTH = 0
"""k of the GEMM: it only writes zeros where it would write what it makes, and that is taken off again."""
OP, VARIANT = "reduce_scatter", "segment"
EXPONENTS = range(11, 26, 2)
"""Of the bytes of a partial result."""


def call_of(ranks: Ranks, rows: int) -> GemmReduceScatterCall:
    return GemmReduceScatterCall(
        site=f"calibrate.{OP}", group=ranks.name, fabric=Fabric.SHM, world=ranks.world, hidden=ROW, dtype="bfloat16",
        max_tokens=rows, timeout_s=60.0,
    )  # fmt: skip


def reserve(ranks: Ranks, call: GemmReduceScatterCall) -> None:
    plan = memory_plan(ranks.name, [(call, SITES[call.fabric].buffers(call))])
    transport(plan.fabric).reserve(topology.discover(ranks.name, 60.0), plan, 0, 60.0)


def rows_of(num_bytes: int, world: int) -> int:
    """Rows of about so many bytes that divide by the ranks."""
    return max(round(num_bytes / (ROW * DTYPE.itemsize * world)), 1) * world


def launches(ranks: Ranks, rows: int, call: GemmReduceScatterCall) -> tuple[Launch, Launch]:
    """The operation, and its GEMM alone."""
    a, b = torch.ones(rows, DEPTH, dtype=DTYPE), torch.ones(DEPTH, ROW, dtype=DTYPE)
    out, op, text = torch.empty(rows, ROW, dtype=DTYPE), torch.ops.weave.gemm_reduce_scatter.default, call.encode()
    return lambda index: op([a], [b], [], 1, text), lambda index: torch.mm(a, b, out=out)


@dataclass
class ReduceScatters(Family):
    """On the fabric `shm`, without the GEMM."""

    devices: ClassVar = frozenset({"cpu"})
    times: dict[int, Rows] = field(default_factory=dict)
    """(bytes, time) by number of ranks."""

    def measure_together(self, session: Session, ranks: Ranks) -> None:
        counts = sorted({rows_of(1 << each, ranks.world) for each in EXPONENTS[:: 4 if session.quick else 1]})
        call = call_of(ranks, counts[-1])
        reserve(ranks, call)

        def take(index: int) -> Sample:
            whole, gemm = launches(ranks, counts[index], call)
            sample = session.clock.together(whole, 100.0, ranks.process_group)
            gemm_us = session.clock.together(gemm, 50.0, ranks.process_group).us
            return Sample(max(sample.us - gemm_us, sample.us / 8), sample.spread)

        sizes = [rows * ROW * DTYPE.itemsize for rows in counts]
        self.times[ranks.world] = session.curve(f"reduce-scatter in shared memory of {ranks.world} ranks", sizes, take)

    def write(self, draft: Draft) -> None:
        samples = (sample for rows in self.times.values() for _, sample in rows)
        origin = draft.origin("scattered", samples, "reduce-scatter of what a GEMM wrote into the arena, bfloat16")
        for world, rows in self.times.items():
            points = never_falling([(size, sample.us) for size, sample in rows])
            draft.add_curve(Fabric.SHM, Curve(origin, OP, VARIANT, world, points))
