"""Measurements of token dispatch to the experts' ranks and of the combine, between GPUs of one host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model.exchange import COMBINE, DISPATCH, OP
from weaveopt.cost_model.machine import Curve
from weaveopt.fabrics import topology
from weaveopt.fabrics.arena import transport
from weaveopt.fabrics.rows_call import memory_plan
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Launch, Sample
from weaveopt.measure.draft import Draft
from weaveopt.measure.fit import never_falling
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession, Rows
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.sharded.op import NAME, SITES
from weaveopt.ops.experts.sharded.peer import PeerExpertExchange
from weaveopt.records.candidate import Fabric

DTYPE, HIDDEN, CHOICES, EXPERTS = torch.bfloat16, 4096, 2, 8
TOKENS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192)
"""Token counts of one rank."""
ROW_BYTES = HIDDEN * DTYPE.itemsize
TIMEOUT_S = 60.0
TAKEN_BYTES_PER_US = 2e5
"""Approximate rate of the link, which sets how many calls a measurement makes."""


def call_of(ranks: Ranks, most: int) -> ExpertExchangeCall:
    return ExpertExchangeCall(
        site=f"calibrate.{OP}", group=ranks.name, fabric=Fabric.PEER, world=ranks.world, hidden=HIDDEN,
        dtype="bfloat16", max_tokens=most, timeout_s=TIMEOUT_S, num_experts=EXPERTS, choices=CHOICES,
        same_tokens=True,
    )  # fmt: skip


def owners(tokens: int, world: int) -> torch.Tensor:
    """[tokens, choices]: the ranks that each token goes to, two that follow one another, in turn: all get as many."""
    return (torch.arange(tokens)[:, None] + torch.arange(CHOICES)) % world


def pushed_bytes(tokens: int, world: int) -> int:
    """Bytes that a rank sends to others, averaged over the ranks."""
    return max(tokens * CHOICES * (world - 1) * ROW_BYTES // world, ROW_BYTES)


def launch(variant: str, tokens: int, site: PeerExpertExchange, ranks: Ranks) -> Launch:
    """One of the kernels by itself: no result depends on what it moves."""
    x = torch.ones(tokens, HIDDEN, dtype=DTYPE, device=ranks.device)
    experts = (owners(tokens, ranks.world) * EXPERTS).to(ranks.device)
    weights = torch.ones(tokens, CHOICES, device=ranks.device)

    def run(index: int) -> object:
        stream = torch.cuda.current_stream().cuda_stream
        if variant == COMBINE:
            return site.combine(x, experts, weights, tokens, stream)
        site.dispatch(x, experts, tokens, stream)
        return None

    return run


@dataclass
class ShardedKernels(Family):
    """Measurements on the fabric `peer`, without the experts."""

    devices: ClassVar = frozenset({"cuda"})
    gpu_fabric: ClassVar = Fabric.PEER
    times: dict[tuple[int, str], Rows] = field(default_factory=dict)
    """(bytes, time) by number of ranks and kernel."""

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        tokens = TOKENS[:: 3 if session.quick else 1]
        call = call_of(ranks, tokens[-1])
        plan = memory_plan(ranks.name, [(call, SITES[call.fabric].buffers(call))])
        transport(plan.fabric).reserve(topology.discover(ranks.name, TIMEOUT_S), plan, 0, TIMEOUT_S)
        site = PeerExpertExchange.bind(call, call.encode(), NAME, lambda: None)
        for variant in (DISPATCH, COMBINE):
            sizes = [size_of(variant, each, ranks.world) for each in tokens]

            def take(index: int, variant: str = variant, sizes: Sequence[int] = sizes) -> Sample:
                guess_us = 10.0 + sizes[index] / TAKEN_BYTES_PER_US
                return session.clock.together(
                    launch(variant, tokens[index], site, ranks), guess_us, ranks.process_group
                )

            what = f"sharded tokens of {ranks.world} ranks, {variant}"
            self.times[ranks.world, variant] = session.curve(what, sizes, take)

    def write(self, draft: Draft) -> None:
        if not self.times:
            return
        samples = (sample for rows in self.times.values() for _, sample in rows)
        origin = draft.origin("sharded", samples, "rows to the ranks of their experts and the sum of results, bfloat16")
        for (world, variant), rows in self.times.items():
            points = never_falling([(size, sample.us) for size, sample in rows])
            draft.add_curve(Fabric.PEER, Curve(origin, OP, variant, world, points))


def size_of(variant: str, tokens: int, world: int) -> int:
    """Size in bytes that indexes the kernel's curve."""
    return pushed_bytes(tokens, world) if variant == DISPATCH else tokens * CHOICES * ROW_BYTES
