"""The kernel between GPUs of several hosts, and the library's all-reduce among the same ranks: all ranks of the job.

Both become curves by message size among so many hosts of so many ranks, of one run, for they compete.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from weaveopt.cost_model import Machine
from weaveopt.cost_model.between_hosts import FLAGGED_PAYLOAD
from weaveopt.cost_model.collectives import LIBRARY
from weaveopt.cost_model.hosts_curves import gpu_doubling
from weaveopt.cost_model.machine import MEASURED, Curve, Link, Origin
from weaveopt.measure import base, draft, fit
from weaveopt.measure.cases.collectives import collective
from weaveopt.measure.cases.reduction.calls import DTYPE, Fused, fused_hosts, reserve_hosts
from weaveopt.measure.cases.reduction.curves import Times, curve_of, measure_curves
from weaveopt.measure.clock import Sample, barrier, sample_of
from weaveopt.measure.ranks import Ranks, subgroup
from weaveopt.measure.session import CalibrationSession, Rows
from weaveopt.ops.reduction.variant import BETWEEN_GPUS, Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric

ROWS = (2048, 4096, 8192, 16384)
"""Elements of a row; the kernel takes none that are longer."""
MOST_BYTES = 8 << 20
"""Maximum size of rows that are exchanged whole: beyond it all-reduces that divide the rows move fewer bytes."""
REDUCED_BYTES = tuple(1 << exponent for exponent in range(11, 27))
"""Sizes of the library's all-reduce: up to 64 MiB, so that both prefill and decode can be priced."""
WHAT = "fused all-reduce + add + RMSNorm between hosts of {}, NVSHMEM, residual and sum whole, bfloat16"
"""Rows as packets and as they are."""
LIBRARY_WHAT = "NCCL's all-reduce as compiled graphs call it, hosts of {}, bfloat16"


def kernels(quick: bool) -> Iterator[Fused]:
    """Every row length and transfer at every power of two of tokens."""
    for row in ROWS[1:2] if quick else ROWS:
        most = MOST_BYTES // (row * DTYPE.itemsize)
        for transfer in BETWEEN_GPUS:
            for exponent in range(0, most.bit_length(), 3 if quick else 1):
                tokens = 1 << exponent
                yield Fused(KernelRow(tokens, Algorithm.DOUBLING, transfer), row, tokens)


@dataclass
class GpuHosts:
    """Measurements among all ranks."""

    hosts: int
    ranks_of_host: int
    machines: int
    """Number of physical machines: fewer than hosts if `WEAVE_HOST` splits a machine into several."""
    times: Times = field(default_factory=dict)
    """Times of the fused kernels."""
    reduced: Rows = field(default_factory=list)
    """Times of the library's all-reduce."""

    def measure(self, session: CalibrationSession) -> None:
        """Every rank calls it, after it has measured what a launch takes."""
        ranks = subgroup(self.hosts * self.ranks_of_host, session.device)
        self._measure_kernels(session, ranks)
        self._measure_library(session, ranks)
        barrier()

    def _measure_kernels(self, session: CalibrationSession, ranks: Ranks) -> None:
        every = list(kernels(session.quick))
        # One arena for all that is captured, before any of it is: graphs hold its addresses.
        reserve_hosts(ranks, self.hosts, every)
        launch_of = partial(fused_hosts, ranks, self.hosts)
        self.times |= measure_curves(
            session, ranks, every, launch_of, lambda size: 8.0 + size / 5e4,
            lambda kernel: f"kernel of {self._group}, {kernel.transfer.value}",
        )  # fmt: skip

    def _measure_library(self, session: CalibrationSession, ranks: Ranks) -> None:
        sizes = REDUCED_BYTES[::3] if session.quick else REDUCED_BYTES

        def take(index: int) -> Sample:
            launch, guess_us = collective(ranks, "all_reduce", sizes[index]), 15.0 + sizes[index] / 5e4
            sample = session.clock.together(launch, guess_us, ranks.process_group)
            return Sample(sample.us - min(session.launch_us, sample.us / 2), sample.spread)

        self.reduced = session.curve(f"all_reduce of {self._group}", sizes, take)

    @property
    def _group(self) -> str:
        return f"{self.hosts} hosts" if self.ranks_of_host == 1 else f"{self.hosts} hosts of {self.ranks_of_host}"

    def renewed(self, before: Machine, name: str, device: torch.device) -> Machine:
        """`before` under `name` with both among so many hosts; curves of other numbers of hosts stay."""
        number = f"{self.hosts}" if self.ranks_of_host == 1 else f"{self.hosts}x{self.ranks_of_host}"
        kernel, library = f"between.nvshmem.{number}", f"between.nccl.{number}"
        spreads = {
            kernel: [sample.spread for rows in self.times.values() for _, sample in rows],
            library: [sample.spread for _, sample in self.reduced],
        }
        gpus = "one GPU each" if self.ranks_of_host == 1 else f"{self.ranks_of_host} GPUs each"
        said = {kernel: WHAT.format(gpus), library: LIBRARY_WHAT.format(gpus)}
        origins = {each: self._origin(device, said[each], spreads[each]) for each in (kernel, library)}
        curves: Mapping[Fabric, tuple[Curve, ...]] = {
            Fabric.NVSHMEM: tuple(
                # Nothing is known beyond the largest size.
                replace(made, hosts=self.hosts, last_bytes=made.points[-1].bytes)
                for (world, row, kind), rows in self.times.items()
                for made in (curve_of(kernel, world, row, kind, rows),)
            ),
            Fabric.LIBRARY: (
                Curve(
                    library, "all_reduce", LIBRARY, self.hosts * self.ranks_of_host,
                    fit.never_falling([(size, sample.us) for size, sample in self.reduced]), hosts=self.hosts,
                ),
            ),
        }  # fmt: skip
        return base.with_curves(before, name, curves, {Fabric.NVSHMEM: self.link(kernel, before)}, origins)

    def link(self, origin: str, before: Machine) -> Link:
        """α and β between hosts as the kernel with packets has them, with the least squares of relative errors; no `o`
        apart.
        """
        launch_us, steps = before.memory.floor_us, gpu_doubling(self.hosts, DTYPE.itemsize, self.ranks_of_host)
        packets = [rows for (_, _, kernel), rows in self.times.items() if kernel.transfer is Transfer.PACKET]
        times = [(size / self.ranks_of_host, sample.us) for rows in packets for size, sample in rows]
        step_us, us_per_byte = fit.line([(size, max(us - launch_us, us / 2)) for size, us in times])
        rate = FLAGGED_PAYLOAD * steps.traffic / us_per_byte * 1e6
        return Link(origin, round(max(step_us / steps.num_steps, 1e-3), 3), round(rate, -6))

    def _origin(self, device: torch.device, what: str, spreads: Sequence[float]) -> Origin:
        where = f"{self.hosts} hosts of {draft.host(device, self.ranks_of_host)}"
        if self.machines < self.hosts:
            where += f", on {self.machines} machine{'s' if self.machines > 1 else ''}: over links within it"
        spread = round(sample_of([max(each, 1e-4) for each in spreads]).us, 4)
        today = datetime.date.today().isoformat()
        return Origin(MEASURED, today, where, f"{what}; torch {torch.__version__}, median, slowest rank", spread)
