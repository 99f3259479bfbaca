"""The library's collectives, as compiled graphs call them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from weaveopt.cost_model.collectives import LIBRARY
from weaveopt.cost_model.machine import Curve, Link
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Clock, Launch, Sample
from weaveopt.measure.draft import Draft
from weaveopt.measure.fit import never_falling
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession, Rows
from weaveopt.records.candidate import Fabric

DTYPE = torch.bfloat16
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
COMPUTED_US = 300.0
"""Computation before each call on CPU ranks. Gloo's threads, and ranks that wait for them, sleep meanwhile, as in a
model; back to back they are awake, and small calls are faster."""


def library_call(
    clock: Clock, ranks: Ranks, kind: str, num_bytes: int, guess_us: float, kernel_us: float = 0.0
) -> Sample:
    """One call of the library. `kernel_us`: what a one-element kernel costs here, which is left out."""
    call, computed_us = collective(ranks, kind, num_bytes), 0.0
    if ranks.device.type == "cpu":
        call, computed_us = _after_computation(call), COMPUTED_US
    sample = clock.together(call, guess_us + computed_us, ranks.process_group)
    us = max(sample.us - computed_us, 1e-3)
    return Sample(us - min(kernel_us, us / 2), sample.spread)


def _after_computation(call: Launch) -> Launch:
    def run(index: int) -> object:
        end = time.perf_counter() + COMPUTED_US * 1e-6
        while time.perf_counter() < end:
            pass
        return call(index)

    return run


def collective(ranks: Ranks, kind: str, num_bytes: int) -> Launch:
    """Build one call of the library, as compiled graphs make it, followed by a one-element kernel.

    Calls of the library back to back are slower than with a kernel between, as there always is in a model.
    `num_bytes` of the larger side of the call.
    """
    call, little = _collective(ranks, kind, num_bytes), torch.zeros(8, device=ranks.device)

    def run(index: int) -> object:
        call(index)
        return little.add_(1)

    return run


def _collective(ranks: Ranks, kind: str, num_bytes: int) -> Launch:
    count = max(num_bytes // DTYPE.itemsize // ranks.world, 1) * ranks.world
    x = torch.zeros(count, device=ranks.device, dtype=DTYPE)
    part = torch.zeros(count // ranks.world, device=ranks.device, dtype=DTYPE)
    ops, name, world = torch.ops._c10d_functional, ranks.name, ranks.world
    wait = ops.wait_tensor
    even = [count // world] * world
    calls: dict[str, Launch] = {
        "all_reduce": lambda index: wait(ops.all_reduce_(x, "sum", name)),
        "all_gather": lambda index: wait(ops.all_gather_into_tensor(part, world, name)),
        "reduce_scatter": lambda index: wait(ops.reduce_scatter_tensor(x, "sum", world, name)),
        "all_to_all": lambda index: wait(ops.all_to_all_single(x, even, even, name)),
    }
    return calls[kind]


@dataclass
class Collectives(Family):
    """NCCL on GPUs, Gloo on CPU ranks; in bfloat16."""

    devices: ClassVar = frozenset({"cpu", "cuda"})
    times: dict[tuple[str, int], Rows] = field(default_factory=dict)
    """(bytes, time) by operation and number of ranks."""

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        exponents = range(11, 29 if session.is_gpu else 27, 4 if session.quick else 1)
        little_us = session.launch_us if session.is_gpu else session.eager_us
        for op in COLLECTIVES:
            if op == "all_to_all" and not session.is_gpu:
                continue  # Gloo has none for tensors of uneven parts
            sizes = [1 << exponent for exponent in (exponents if op == "all_reduce" else exponents[::2])]

            def take(index: int, op: str = op, sizes: Sequence[int] = sizes) -> Sample:
                guess_us = 15.0 + sizes[index] / (2e5 if session.is_gpu else 5e2)
                return library_call(session.clock, ranks, op, sizes[index], guess_us, little_us)

            self.times[op, ranks.world] = session.curve(f"{op} of {ranks.world} ranks", sizes, take)

    def write(self, draft: Draft) -> None:
        samples = [sample for rows in self.times.values() for _, sample in rows]
        library = "nccl" if draft.is_gpu else "gloo"
        origin = draft.origin(library, samples, "collectives as compiled graphs call them, bfloat16")
        for (op, world), rows in self.times.items():
            points = never_falling([(size, sample.us) for size, sample in rows])
            draft.add_curve(Fabric.LIBRARY, Curve(origin, op, LIBRARY, world, points))
        # α of a step and β of the wire, from the ends of the largest group's all-reduce.
        largest = max(world for op, world in self.times if op == "all_reduce")
        points = never_falling([(size, sample.us) for size, sample in self.times["all_reduce", largest]])
        latency_us = points[0].us / (2 * (largest - 1))
        rate = 2 * (largest - 1) / largest * points[-1].bytes / (points[-1].us - points[0].us) * 1e6
        draft.links[Fabric.LIBRARY] = Link(origin, round(latency_us, 3), round(rate, -6))
