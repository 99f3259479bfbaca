"""Topology of a process group: its ranks, where they run, and which fabric reaches all of them.

`discover` asks the ranks, through the store that the process group was made with; `fake` makes the answer up,
for captures that run without peers.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from weaveopt.cost_model import Gpu
from weaveopt.errors import AgreementError, ArenaError, WeaveError
from weaveopt.fabrics import gpus, user_profiles
from weaveopt.fabrics.addresses import own_address
from weaveopt.fabrics.rounds import Rounds
from weaveopt.fabrics.stores import bounded
from weaveopt.fabrics.traits import TRAITS, rejection
from weaveopt.fabrics.user_profiles import CommonProfiles
from weaveopt.records.candidate import Fabric, Rejection
from weaveopt.wording import counted, listed

Payload = Mapping[str, str | int]
"""Values that a rank publishes; plain, as they are encoded in JSON."""


@dataclass(frozen=True)
class Group:
    """The ranks of a process group."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    rank: int
    """This rank's index in `ranks`."""


@dataclass(frozen=True)
class Topology:
    """Hosts, device and GPUs of the ranks of a group."""

    group: Group
    hosts: tuple[str, ...]
    """Host of each rank. Ranks with equal hosts can map each other's memory."""
    device: str
    """`cpu` or `cuda`, the same on all ranks."""
    fake: bool = False
    """True if there are no peers; only good for capture."""
    gpus: tuple[Gpu, ...] = ()
    """GPU of each rank; empty if the ranks use CPUs, or the group is fake."""
    no_peer_access: tuple[int, int] | None = None
    """Two ranks of one host whose GPUs cannot map each other's memory, the first such pair."""
    no_multicast: Rejection | None = None
    """Why the ranks have no NVLink multicast mapping of their memory; None where torch makes one."""
    no_host_memory: Rejection | None = None
    """Why the ranks' GPUs cannot use memory of the host that processes share; None where they can."""
    allowed: frozenset[Fabric] = frozenset()
    """Fabrics that the option `fabrics` names; empty: all. The library is always allowed."""
    profiles: CommonProfiles | None = None
    """Profiles in the users' data folders of the ranks; None: nobody asked."""

    @property
    def world(self) -> int:
        return len(self.hosts)

    @property
    def num_hosts(self) -> int:
        return len(set(self.hosts))

    @property
    def num_machines(self) -> int:
        """Number of physical machines: fewer than hosts if `WEAVE_HOST` splits a machine into several."""
        return len({tuple(word for at, word in enumerate(name.split("/")) if at != _WEAVE_HOST) for name in self.hosts})

    def fabrics(self) -> tuple[tuple[Fabric, Rejection | None], ...]:
        """Every fabric, with the reason why it does not reach all ranks of the group, or None where it does."""
        return tuple((fabric, self._against(fabric)) for fabric in Fabric)

    def restricted(self, names: Iterable[str]) -> Topology:
        """The same with no fabric but those of the option `fabrics`; no names: all."""
        return replace(self, allowed=frozenset(map(Fabric, names)))

    def _against(self, fabric: Fabric) -> Rejection | None:
        missing = self.no_peer_access, self.no_multicast, self.no_host_memory
        found = rejection(fabric, self.device, self.num_hosts, self.fake, *missing)
        if found is None and not TRAITS[fabric].within_host:
            counts = sorted(Counter(self.hosts).values())
            if counts[0] != counts[-1]:
                values = (("fewest", counts[0]), ("most", counts[-1]))
                return Rejection("uneven_hosts", f"{fabric.value} joins hosts of equally many ranks", values)
        if found is None and self.allowed and fabric not in (*self.allowed, Fabric.LIBRARY):
            return Rejection("fabric_excluded", "the option fabrics leaves the fabric out", (("fabric", fabric.value),))
        return found


def fake(world: int, hosts: int = 1, device: str = "cpu") -> Topology:
    """The topology of `world` ranks spread evenly over `hosts`, seen by rank 0, without any rank there."""
    if world < 1 or hosts < 1 or world % hosts:
        raise WeaveError(f"cannot spread {counted(world, 'rank')} evenly over {counted(hosts, 'host')}")
    names = tuple(f"host{rank * hosts // world}" for rank in range(world))
    return Topology(Group("0", tuple(range(world)), 0), names, device, fake=True)


_WEAVE_HOST = 1
"""Position of that variable among the words of a host's name, see `_host`."""
_WHAT = "what"
"""Key, in every payload, of the subject on which its rank wanted to agree."""
_ALL_READ_S = 5.0
"""Longest time that rank 0, when it is about to fail, waits for the others to read the exchanged payloads."""


class RecordExchange:
    """A bounded all-gather of small records among the ranks of a group, through the default store.

    No collective runs, so a rank that never comes is an error on all others and not a hang. Every exchange
    has its own keys: nothing that an earlier process group left in the store is ever read.
    """

    _times_made: ClassVar[dict[tuple[str, tuple[int, ...]], int]] = {}

    def __init__(self, group: Group) -> None:
        times = self._times_made.get((group.name, group.ranks), 0)
        self._times_made[group.name, group.ranks] = times + 1
        ranks = ",".join(map(str, group.ranks))
        self.group = group
        self.store = dist.PrefixStore(f"weaveopt/{group.name}/{ranks}/{times}", c10d._get_default_store())
        self._num_rounds = 0

    def gather(self, payload: Payload, what: str, timeout_s: float) -> tuple[Payload, ...]:
        """Everyone's `payload`, in group order.

        Raises `AgreementError` naming the ranks whose payload did not come within `timeout_s`, or one that called it
        for another purpose and has another payload, or saying that the store failed or does not answer, as happens
        if its host rank is gone or stopped; `what` names in the message what the ranks wanted to agree on.
        """
        keys = [f"{self._num_rounds}/{rank}" for rank in range(len(self.group.ranks))]
        self._num_rounds += 1
        where = f"group {self.group.name!r}"
        answers = {**payload, _WHAT: what}
        answer = bounded(lambda: self._exchange(keys, answers, timeout_s), where, what, timeout_s)
        if isinstance(answer, list):
            self._settle(rank for rank in self.group.ranks if rank not in answer)
            raise AgreementError(
                f"{where}: {listed('rank', answer)} of {self.group.ranks} did not come within "
                f"{timeout_s:g} s for {what}"
            )
        for rank, other in zip(self.group.ranks, answer, strict=True):
            if other[_WHAT] != what and other.keys() != payload.keys() | {_WHAT}:
                self.settle()
                raise AgreementError(
                    f"{where}: rank {self.group.ranks[self.group.rank]} is at {what!r} while rank {rank} is at "
                    f"{other[_WHAT]!r}: ranks of a group must do the same in the same order"
                )
        return answer

    def settle(self) -> None:
        """Make rank 0 wait until all have read the last payloads, a few seconds at most.

        For ranks that raise because of them: rank 0 may host the store, and end. The others would report that the store
        failed, not what they disagreed on.
        """
        self._settle(self.group.ranks)

    def _settle(self, ranks: Iterable[int]) -> None:
        """`settle` among `ranks`, global ones, which wrote a payload."""
        if self.group.ranks[self.group.rank] != 0:
            return
        keys = [f"{self._num_rounds - 1}/{self.group.ranks.index(rank)}/read" for rank in ranks]

        def wait() -> None:
            with contextlib.suppress(RuntimeError):  # one is gone, or late: no rank can wait for it
                self.store.wait(keys, timedelta(seconds=_ALL_READ_S))

        thread = threading.Thread(target=wait, name="weaveopt-store", daemon=True)
        thread.start()
        thread.join(_ALL_READ_S)

    def _exchange(self, keys: list[str], payload: Payload, timeout_s: float) -> tuple[Payload, ...] | list[int]:
        """Everyone's payload, or the ranks whose payload did not come. Raises what the store raises."""
        self.store.set(keys[self.group.rank], json.dumps(dict(payload)))
        try:
            self.store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:
            missing = [r for r, key in zip(self.group.ranks, keys, strict=True) if not self.store.check([key])]
            if not missing:
                raise
            found: tuple[Payload, ...] | list[int] = missing
        else:
            found = tuple(json.loads(self.store.get(key)) for key in keys)
        with contextlib.suppress(RuntimeError):  # where the store is gone by now, no rank waits for this one
            self.store.set(f"{keys[self.group.rank]}/read", "")
        return found


@dataclass(frozen=True)
class _Known:
    """A discovered topology, valid as long as the process group is the same object."""

    process_group: weakref.ReferenceType[dist.ProcessGroup]
    topology: Topology
    exchange: RecordExchange | None
    rounds: Rounds | None = None


_known: dict[str, _Known] = {}


def discover(group_name: str, timeout_s: float) -> Topology:
    """Discover where the ranks of process group `group_name` run; exchanged once per process group.

    All ranks of the group call it at the same point. Raises `AgreementError` if one does not come within
    `timeout_s`, or if ranks use different devices, and `WeaveError` if there is no such group.
    """
    return _look_up(group_name, timeout_s).topology


def exchange(group_name: str, timeout_s: float) -> RecordExchange:
    """The channel among the ranks of a (real) group; see `RecordExchange`."""
    known = _look_up(group_name, timeout_s)
    if known.exchange is None:
        raise WeaveError(f"group {group_name!r} is fake: it has no peers to exchange anything with")
    return known.exchange


def leave_multicast(group_name: str, why: str, timeout_s: float) -> None:
    """Stop using multicast in the group, for the reason `why`. All its ranks call it."""
    known = _look_up(group_name, timeout_s)
    message = "a first call by NVLink multicast was not right on all ranks, so the group uses none"
    refused = Rejection("multicast_failed", message, (("why", why),))
    _known[group_name] = replace(known, topology=replace(known.topology, no_multicast=refused))


def rounds(group_name: str, timeout_s: float) -> Rounds:
    """The rounds in which the ranks of a (real) group compare their graphs."""
    known = _look_up(group_name, timeout_s)
    assert known.rounds is not None, f"group {group_name!r} is fake"
    return known.rounds


def last_words(group_name: str, rank: int) -> str:
    """Return the reason that the global rank `rank` of the group gave when it ended; empty if it gave none."""
    known = _known.get(group_name)
    return "" if known is None or known.rounds is None else known.rounds.words_of(rank)


def silent_ranks(group_name: str) -> tuple[int, ...]:
    """Global ranks of the group whose processes are gone or do not answer; empty where its ranks compared no graph."""
    known = _known.get(group_name)
    return () if known is None or known.rounds is None else known.rounds.silent()


def process_group(group_name: str) -> dist.ProcessGroup:
    """The process group of that name, or `WeaveError`."""
    try:
        return c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError) as error:
        raise WeaveError(
            f"there is no process group {group_name!r} (torch.distributed initialized?): {error}"
        ) from None


def _look_up(group_name: str, timeout_s: float) -> _Known:
    pg = process_group(group_name)
    known = _known.get(group_name)
    if known is None or known.process_group() is not pg:
        known = _known[group_name] = _ask(pg, group_name, timeout_s)
    return known


def _ask(pg: dist.ProcessGroup, group_name: str, timeout_s: float) -> _Known:
    ranks = tuple(dist.get_process_group_ranks(pg))
    group = Group(group_name, ranks, pg.rank())
    device = "cuda" if "cuda" in {d.type for d in pg._device_types} and torch.cuda.is_available() else "cpu"
    if dist.get_backend(pg) == "fake":
        return _Known(weakref.ref(pg), Topology(group, ("host0",) * len(ranks), device, fake=True), None)
    channel = RecordExchange(group)
    own: dict[str, str | int] = {"host": _host(), "device": device, **(gpus.describe() if device == "cuda" else {})}
    own |= {"hardware": user_profiles.device_name(device), **user_profiles.published()}
    payloads = channel.gather(own, "the topology", timeout_s)
    devices = tuple(str(p["device"]) for p in payloads)
    if len(set(devices)) > 1:
        channel.settle()
        raise AgreementError(f"group {group_name!r}: ranks {ranks} use different devices: {devices}")
    found = Topology(group, tuple(str(p["host"]) for p in payloads), device)
    hardware = [str(p["hardware"]) for p in payloads]
    found = replace(found, profiles=user_profiles.common(hardware, payloads))
    if device == "cuda":
        found = replace(
            found,
            no_multicast=gpus.no_multicast(payloads, ranks),
            no_host_memory=gpus.no_host_memory(payloads, ranks),
        )
    described = gpus.gpus_of(payloads)
    if described:
        unreachable = gpus.without_access(payloads, group.rank)
        # All ranks of the group have to name the same pair.
        answers = channel.gather({"unreachable": json.dumps(unreachable)}, "peer access", timeout_s)
        pairs = [
            (ranks[r], ranks[peer])
            for r, record in enumerate(answers)
            for peer in json.loads(str(record["unreachable"]))
        ]
        found = replace(found, gpus=described, no_peer_access=pairs[0] if pairs else None)
    rounds = Rounds(group_name, ranks, group.rank, pg, channel.store, _address(found))
    return _Known(weakref.ref(pg), found, channel, rounds)


def _address(known: Topology) -> str:
    """The address at which the ranks of the group reach this one."""
    if known.num_machines > 1:
        with contextlib.suppress(ArenaError):
            return own_address()
    return "127.0.0.1"


def _host() -> str:
    """Equal for two processes if and only if they can map each other's memory by /proc and pid."""
    words = [socket.gethostname(), os.environ.get("WEAVE_HOST", "")]
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    if boot_id.exists():
        words.append(boot_id.read_text().strip())
    for path in ("/dev/shm", "/proc/self/ns/pid"):
        if os.path.exists(path):
            info = os.stat(path)
            words.append(f"{info.st_dev}.{info.st_ino}")
    return "/".join(words)
