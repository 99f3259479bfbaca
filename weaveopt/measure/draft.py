"""A profile in the making: the blocks and curves that families write, each with its origin and the spread of it."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import replace
from statistics import median

import torch

from weaveopt import cost_model
from weaveopt.config import variable
from weaveopt.cost_model.compiled import CompiledCosts
from weaveopt.cost_model.energy import PowerCosts
from weaveopt.cost_model.machine import (
    AttentionCosts,
    Contention,
    CopyEngine,
    Curve,
    FabricCosts,
    GemmCosts,
    KernelCurve,
    LaunchCosts,
    Link,
    Machine,
    MemoryCosts,
    Origin,
    Wiring,
)
from weaveopt.fabrics import gpus
from weaveopt.fabrics.traits import TRAITS
from weaveopt.measure import fit
from weaveopt.measure.clock import Sample
from weaveopt.records.candidate import Fabric

LEAST_ERROR, MOST_ERROR = 0.03, 0.25
"""Smallest error of any profile: clocks and caches differ from run to run, and few points say little about the
error."""


def host(device: torch.device, world: int) -> str:
    """`4 x NVIDIA H200` or `2-core x86_64`: what matters of the host, and nothing that names it."""
    if device.type == "cuda":
        return f"{world} x {torch.cuda.get_device_name(device)}"
    return f"{_num_cores()}-core {platform.machine()}"


def wiring(device: torch.device) -> Wiring:
    """Describe the host's hardware, as far as torch exposes it."""
    if device.type != "cuda":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Wiring("host", _num_cores(), pages, (("ranks", "shared memory of one host"),))
    found = torch.cuda.get_device_properties(device)
    peers = [i for i in range(torch.cuda.device_count()) if i != device.index]
    reached = [i for i in peers if torch.cuda.can_device_access_peer(device.index or 0, i)]
    word = "peer access between all pairs" if peers and len(reached) == len(peers) else f"{len(reached)} peers reached"
    return Wiring("host", found.multi_processor_count, found.total_memory, (("gpus", word),))


def link_class(fabric: Fabric, device: torch.device) -> str:
    """Class of the link that `fabric` uses between the GPUs of this host; empty on CPU ranks, or for one GPU.

    NCCL goes through memory of the host where GPUs have no peer access, and where `NCCL_P2P_DISABLE` is set.
    """
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return ""
    if TRAITS[fabric].needs_host_memory:
        return "host"
    off = fabric is Fabric.LIBRARY and variable("NCCL_P2P_DISABLE") not in ("", "0")
    if off or gpus.pair_without_access() is not None:
        return "host"
    return "nvlink" if gpus.have_peer_atomics() else "pcie_p2p"


class Draft:
    """Costs known so far. `machine` needs `memory`, and a link of each fabric that has curves."""

    def __init__(self, device: torch.device, world: int, before: Machine | None) -> None:
        self.device, self.world, self.before = device, world, before
        self.is_gpu = device.type == "cuda"
        self.units = torch.cuda.get_device_properties(device).multi_processor_count if self.is_gpu else 1
        """Processors that tiles go over in waves: SMs, or 1 on devices without waves."""
        self.memory: MemoryCosts | None = None
        self.gemms: list[GemmCosts] = []
        self.links: dict[Fabric, Link] = {}
        self.kernels: list[KernelCurve] = []
        self.attention: AttentionCosts | None = None
        self.contention: Contention | None = None
        self.copy_engine: CopyEngine | None = None
        self.launch: LaunchCosts | None = None
        self.compiled: CompiledCosts | None = None
        self.power: PowerCosts | None = None
        self._curves: dict[Fabric, list[Curve]] = {}
        self._origins: dict[str, Origin] = {}
        self._host = host(device, world)
        middle = "median" if device.type == "cuda" else "mean"
        self._note = f"torch {torch.__version__}, {middle}, slowest rank"

    def origin(self, name: str, samples: Iterable[Sample], what: str) -> str:
        """The name of an origin measured today, with the spread of its samples."""
        spreads = [sample.spread for sample in samples]
        spread = round(median(spreads), 4) if spreads else None
        today = datetime.date.today().isoformat()
        self._origins[name] = Origin("measured", today, self._host, f"{what}; {self._note}", spread)
        return name

    def add_curve(self, fabric: Fabric, curve: Curve) -> None:
        self._curves.setdefault(fabric, []).append(curve)

    def machine(self, name: str) -> Machine:
        """The profile."""
        memory = self.memory or self._memory_before()
        self.origin("host", (), "as reported by the system")
        for fabric in {Fabric.LIBRARY, *self._curves} - set(self.links):
            self.links[fabric] = self._link_before(fabric)
        made = Machine(
            name=name,
            device=self.device.type,
            ranks_per_host=max(self.world, torch.cuda.device_count()) if self.is_gpu else _num_cores(),
            relative_error=LEAST_ERROR,
            origins=(),
            memory=memory,
            gemms=tuple(self.gemms),
            inter_host=self._between_hosts(),
            fabric_costs=tuple(
                FabricCosts(
                    fabric,
                    link,
                    tuple(sorted(self._curves.get(fabric, ()), key=curve_order)),
                    link_class=link_class(fabric, self.device),
                )
                for fabric, link in sorted(self.links.items(), key=lambda item: item[0].value)
            ),
            attention=self.attention,
            contention=self.contention,
            copy_engine=self.copy_engine,
            launch=self.launch,
            wiring=wiring(self.device),
            compiled=self.compiled or self._compiled_before(),
            power=self.power,
            kernels=tuple(self.kernels),
        )
        return replace(made, relative_error=relative_error(made), origins=tuple(sorted(self._origins.items())))

    def _between_hosts(self) -> Link:
        """One host cannot measure the link to another: it is kept from the profile before, or assumed."""
        if self.before is not None:
            self._origins["between"] = dict(self.before.origins)[self.before.inter_host.origin]
            return replace(self.before.inter_host, origin="between")
        note, link = "50 GB/s (400 Gbit/s) between hosts, assumed", Link("between", 10.0, 50e9)
        if not self.is_gpu:
            note, link = "10 Gbit/s Ethernet between hosts, assumed", Link("between", 50.0, 1.25e9)
        self._origins["between"] = Origin("estimate", "", "", note)
        return link

    def _link_before(self, fabric: Fabric) -> Link:
        """Return a link that could not be measured, as with one rank: that of the previous profile, or an assumed
        library link."""
        before = self.before
        known = None if before is None else next((c for c in before.fabric_costs if c.fabric is fabric), None)
        if before is not None and known is not None:
            name = f"ranks, {fabric.value}"
            self._origins[name] = dict(before.origins)[known.link.origin]
            return replace(known.link, origin=name)
        assert fabric is Fabric.LIBRARY, f"no family wrote the link of {fabric.value}"
        self._origins["ranks"] = Origin("estimate", "", "", "25 GB/s between ranks, assumed: one rank was measured")
        return Link("ranks", 10.0, 25e9)

    def _memory_before(self) -> MemoryCosts:
        assert self.before is not None, "no family wrote what memory costs"
        self._origins["memory"] = dict(self.before.origins)[self.before.memory.origin]
        return replace(self.before.memory, origin="memory")

    def _compiled_before(self) -> CompiledCosts | None:
        """The host's part was found on whole models: chains of little kernels in cache show next to none of it."""
        before = self.before
        known = before if before is not None and before.compiled is not None else cost_model.load("cpu")
        if known.device != self.device.type or known.compiled is None:
            return None
        self._origins["compiled"] = dict(known.origins)[known.compiled.origin]
        return replace(known.compiled, origin="compiled")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


OTHER_COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_to_all"})


def relative_error(machine: Machine) -> float:
    """Relative error of decisions: the interpolation error of the curves of all-reduces and fused operations."""
    curves = [curve for costs in machine.fabric_costs for curve in costs.curves if curve.op not in OTHER_COLLECTIVES]
    error = fit.between_error(curve.points for curve in curves)
    return round(min(max(LEAST_ERROR, error), MOST_ERROR), 3)


def curve_order(curve: Curve) -> tuple[str, int, int, int, tuple[tuple[str, int], ...]]:
    """Sort key of a profile's curves: operation, hosts, world size, row length and variant, numbers as numbers."""
    words = tuple((text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", curve.variant))
    return curve.op, curve.hosts, curve.world, curve.row, words
