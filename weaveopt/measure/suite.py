"""Measures a machine: every family of `cases`, in the order in which all ranks take the steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weaveopt.config import resolve
from weaveopt.cost_model import Machine
from weaveopt.errors import WeaveError
from weaveopt.fabrics import topology
from weaveopt.fabrics.topology import Topology
from weaveopt.fabrics.traits import TRAITS
from weaveopt.measure.cases import FAMILIES, GpuHosts, HostExchanges, name_of
from weaveopt.measure.cases.between_hosts import HostLink, host_ranks
from weaveopt.measure.cases.family import Family
from weaveopt.measure.cases.launch import Launches, launches
from weaveopt.measure.clock import barrier
from weaveopt.measure.draft import Draft
from weaveopt.measure.ranks import subgroup
from weaveopt.measure.session import OVERALL, CalibrationSession
from weaveopt.measure.unfinished import ALONE, UnfinishedRun
from weaveopt.records.candidate import Fabric

NUM_ATTEMPTS = 3
GROUP_TIMEOUT_S = 60.0
"""Longest wait for the ranks of the run to say where they are."""


def measure(
    session: CalibrationSession,
    name: str,
    before: Machine | None,
    only: Sequence[str] = (),
    run: UnfinishedRun | None = None,
) -> Machine:
    """The profile `name` of this machine, the same on every rank.

    The link to another host, which one host cannot measure, is kept from `before`, or assumed; so is the link between
    the ranks if there is one rank. With `only`, names of families, no others are measured, and the parts of `before`
    that a profile requires are kept. What `run` holds of a run that was killed is not measured again.
    """
    run, fabrics = run or UnfinishedRun(None), gpu_fabrics(session)
    families = [
        run.known(family())
        for family in families_on(session.device.type)
        if is_wanted(family, only) and (not session.is_gpu or family.gpu_fabric in (None, *fabrics))
    ]
    total, done = len(families) * (1 + len(session.worlds)), 0
    with torch.no_grad():
        for family in families:
            session.show_progress(OVERALL, done, total)
            if not run.has(family, ALONE):
                family.measure_alone(session)
                run.keep(family, ALONE)
            done += 1
        for world in session.worlds:
            ranks = subgroup(world, session.device)
            for family in families:
                session.show_progress(OVERALL, done, total)
                if ranks.inside and not run.has(family, world):
                    family.measure_together(session, ranks)
                    run.keep(family, world)
                done += 1
            barrier()
    session.show_progress(OVERALL, total, total)
    # Rank 0 has been in every group: what it holds is complete.
    box = [families]
    dist.broadcast_object_list(box, src=0)
    draft = Draft(session.device, session.world, before)
    for family in box[0]:
        if session.worlds or not _needs_peers(family):
            family.write(draft)
    return draft.machine(name)


def is_wanted(family: type[Family], only: Sequence[str]) -> bool:
    """True if a run of the families `only` measures it; empty: of all."""
    # The time of a launch is always measured, as other families subtract it.
    return not only or family is Launches or name_of(family) in only


def gpu_fabrics(session: CalibrationSession) -> tuple[Fabric, ...]:
    """Fabrics whose kernels are measured between the GPUs: those that reach all ranks and that `WEAVE_FABRICS` allows.

    One that gives way to another is measured where the other one is not, or where the variable names it.
    """
    if not session.is_gpu or session.world < 2:
        return ()
    named = resolve().fabrics
    group = str(dist.distributed_c10d._get_default_group().group_name)
    known = topology.discover(group, GROUP_TIMEOUT_S).restricted(named)
    reached = [fabric for fabric, why in known.fabrics() if why is None and fabric is not Fabric.LIBRARY]
    return tuple(
        fabric for fabric in reached if fabric.value in named or not TRAITS[fabric].gives_way_to.intersection(reached)
    )


def families_on(device: str) -> tuple[type[Family], ...]:
    """Families measured on devices of this type, `cpu` or `cuda`."""
    return tuple(family for family in FAMILIES if device in family.devices)


def _needs_peers(family: Family) -> bool:
    """True if a family cannot measure anything on a rank without peers."""
    return type(family).measure_alone is Family.measure_alone


def measure_between_hosts(session: CalibrationSession, topology: Topology, name: str, base: Machine) -> Machine:
    """`base`, a profile of one such host, with the link between hosts as it is, and what exchanges take of busy hosts;
    the same on every rank. Between GPUs: what the kernel between hosts takes, and the library.

    Times that contradict themselves are measured again, then refused with a `WeaveError`.
    """
    if session.is_gpu:
        return _measure_gpu_hosts(session, topology, name, base)
    by_host = host_ranks(topology)
    for attempt in range(NUM_ATTEMPTS):
        link, exchanges = HostLink(len(by_host), len(by_host[0])), HostExchanges(len(by_host), len(by_host[0]))
        with torch.no_grad():
            link.measure(session, topology)
            exchanges.measure(session, topology)
        # Rank 0 has been in everything.
        box = [(link, exchanges)]
        dist.broadcast_object_list(box, src=0)
        link, exchanges = box[0]
        try:
            return exchanges.renewed(link.renewed(base, name, session.device), session.device)
        except WeaveError:  # the same on every rank
            if attempt == NUM_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _measure_gpu_hosts(session: CalibrationSession, topology: Topology, name: str, base: Machine) -> Machine:
    by_host = host_ranks(topology)
    found = GpuHosts(len(by_host), len(by_host[0]), topology.num_machines)
    with torch.no_grad():
        session.launch_us, session.eager_us = launches(session.clock, session.device)
        found.measure(session)
    # Rank 0 has been in everything.
    box = [found]
    dist.broadcast_object_list(box, src=0)
    return box[0].renewed(base, name, session.device)
