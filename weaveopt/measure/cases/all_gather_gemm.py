"""The all-gather in front of GEMMs over shared memory, between CPU ranks; in bfloat16."""

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
from weaveopt.ops.all_gather_gemm.call import AllGatherGemmCall
from weaveopt.ops.all_gather_gemm.op import SITES
from weaveopt.records.candidate import Fabric

DTYPE = torch.bfloat16
ROW = 1024
"""Elements of a row; times go by bytes alone."""
OP, VARIANT = "all_gather", "segment"
EXPONENTS = range(11, 26, 2)
"""Of the bytes of the gathered rows."""


def call_of(ranks: Ranks, rows: int) -> AllGatherGemmCall:
    return AllGatherGemmCall(
        site=f"calibrate.{OP}", group=ranks.name, fabric=Fabric.SHM, world=ranks.world, hidden=ROW, dtype="bfloat16",
        max_tokens=rows, timeout_s=60.0, hands_out_rows=True,
    )  # fmt: skip


def reserve(ranks: Ranks, call: AllGatherGemmCall) -> None:
    plan = memory_plan(ranks.name, [(call, SITES[call.fabric].buffers(call))])
    transport(plan.fabric).reserve(topology.discover(ranks.name, 60.0), plan, 0, 60.0)


def launch(rows_of_rank: int, call: AllGatherGemmCall) -> Launch:
    """The operation without any GEMM."""
    shard = torch.ones(rows_of_rank, ROW, dtype=DTYPE)
    op, text = torch.ops.weave.all_gather_gemm.default, call.encode()
    return lambda index: op(shard, [], [], 1, text)


@dataclass
class AllGathers(Family):
    """On the fabric `shm`, without the GEMMs."""

    devices: ClassVar = frozenset({"cpu"})
    times: dict[int, Rows] = field(default_factory=dict)
    """(bytes, time) by number of ranks."""

    def measure_together(self, session: Session, ranks: Ranks) -> None:
        exponents = EXPONENTS[:: 4 if session.quick else 1]
        own = sorted({max((1 << each) // (ROW * DTYPE.itemsize * ranks.world), 1) for each in exponents})
        call = call_of(ranks, own[-1] * ranks.world)
        reserve(ranks, call)

        def take(index: int) -> Sample:
            return session.clock.together(launch(own[index], call), 100.0, ranks.process_group)

        sizes = [rows * ranks.world * ROW * DTYPE.itemsize for rows in own]
        self.times[ranks.world] = session.curve(f"all-gather in shared memory of {ranks.world} ranks", sizes, take)

    def write(self, draft: Draft) -> None:
        samples = (sample for rows in self.times.values() for _, sample in rows)
        origin = draft.origin("gathered", samples, "all-gather of rows through the arena, bfloat16")
        for world, rows in self.times.items():
            points = never_falling([(size, sample.us) for size, sample in rows])
            draft.add_curve(Fabric.SHM, Curve(origin, OP, VARIANT, world, points))
