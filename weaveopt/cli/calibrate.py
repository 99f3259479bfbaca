"""`weaveopt calibrate`: measures this machine, on all of its ranks, and writes a profile."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weaveopt.cli.progress import progress
from weaveopt.config import resolve, variable
from weaveopt.errors import OptionError, PeerTimeoutError, ProfileError, WeaveError
from weaveopt.wording import counted

if TYPE_CHECKING:
    import torch

    from weaveopt.cost_model import Machine
    from weaveopt.fabrics.topology import Topology

GROUP_TIMEOUT_S = 300
MOST_CHARACTERS = 255
"""Length of a machine's name, as in the profile's schema."""
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# Multicast objects can put the GPUs of a shared host out of service; nothing that is measured uses them.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclass(frozen=True)
class CalibrateArguments:
    """The parsed command line."""

    output: Path | None
    """None: a file in the user's data folder, which is used from then on."""
    name: str | None
    device: str
    quick: bool
    base: str | None = None
    only: tuple[str, ...] = ()
    """Families of measurements, see `weaveopt.measure.cases`; none: all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures GEMMs, kernels, collectives and fused exchanges on the ranks that a launcher started, and writes "
        "a profile: torchrun --nproc-per-node 4 -m weaveopt calibrate, or accelerate launch -m ... On ranks "
        "of several hosts: the link between them, between GPUs the kernel over NVSHMEM and NCCL, for the profile of "
        "one host that --base names. On a host of one GPU: what one rank can measure, without a launcher."
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: the user's data folder, from where it is used on this hardware without being named",
    )
    parser.add_argument("--name", help="the machine's name in reports (default: the file's)")
    parser.add_argument(
        "--base",
        metavar="NAME|FILE",
        help="a profile to renew: what these ranks cannot measure, such as larger groups, is kept from it",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="FAMILY",
        help="measure these kinds alone, such as tile_kernels, for the profile that --base names",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="a coarse look in seconds; not for decisions")


def question(args: argparse.Namespace) -> CalibrateArguments:
    """The arguments, typed. Raises `OptionError` for what cannot be meant."""
    asked = CalibrateArguments(args.output, args.name, args.device, args.quick, args.base, tuple(args.only))
    _check_output(asked.output)
    name = asked.name or ("" if asked.output is None else asked.output.stem)
    if not name.isprintable() or len(name) > MOST_CHARACTERS:
        raise OptionError(f"--name {name[:40]!r}: expected at most {MOST_CHARACTERS} characters, none of control")
    if asked.only and asked.base is None:
        raise OptionError("--only measures a part of a profile: name the profile to renew with --base NAME|FILE")
    if asked.base is not None:
        _loaded(asked.base)
    _check_ranks(asked)
    return asked


def _check_output(output: Path | None) -> None:
    """Raises `OptionError` if the profile cannot be written: now, and not after minutes of measuring."""
    if output is None:
        from weaveopt.fabrics import user_profiles

        folder = user_profiles.folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(folder, os.W_OK)
        except OSError:
            writable = False
        if not writable:
            raise OptionError(f"{folder} is not writable: name a file with --output FILE")
        return
    folder = output.absolute().parent
    if not os.path.isdir(folder):  # false too where one may not look
        raise OptionError(f"--output {output}: no directory {folder}")
    if not os.access(folder, os.W_OK):
        raise OptionError(f"--output {output}: {folder} is not writable")
    if os.path.isdir(output):
        raise OptionError(f"--output {output}: is a directory, expected a file")


def _output(asked: CalibrateArguments, device: torch.device, where: Topology) -> Path:
    """The file that is written."""
    if asked.output is not None:
        return asked.output
    from weaveopt.fabrics import user_profiles

    hardware = user_profiles.device_name(device.type)
    per_host = where.world // where.num_hosts
    return user_profiles.folder() / user_profiles.file_name(hardware, where.no_peer_access is None, per_host)


def _check_ranks(asked: CalibrateArguments) -> None:
    """Check the ranks. Raises `OptionError` unless a launcher started several, or this host has one GPU to measure
    alone."""
    missing = [name for name in LAUNCHED if not variable(name)]
    wrong = [name for name in LAUNCHED if name not in missing and not variable(name).isdecimal()]
    alone = len(missing) == len(LAUNCHED) or (not missing and not wrong and int(variable("WORLD_SIZE")) < 2)
    if not (missing or wrong or alone) or (alone and asked.device != "cpu" and _num_gpus() == 1):
        return
    if missing:
        found = f"{missing[0]} is not set"
    else:
        found = f"{wrong[0]} is {variable(wrong[0])!r}, expected a number" if wrong else "WORLD_SIZE is 1"
    raise OptionError(
        "calibrate measures at least 2 ranks together, or the GPU of a host that has one, and found one process "
        f"({found}): start it with torchrun --nproc-per-node N -m weaveopt calibrate, or with accelerate "
        "launch"
    )


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def run(asked: CalibrateArguments) -> int:
    """Measures, writes the profile on rank 0 and says where. Returns the exit code."""
    os.environ.update(NO_MULTICAST)
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    device = _device(asked.device)
    base = None if asked.base is None else _base(asked.base, device)
    _check_families(asked.only, device)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
        backend = "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    try:
        if variable("RANK"):
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    except (dist.DistError, ValueError) as error:  # no MASTER_ADDR, a port in use, a rank that does not come
        words = " ".join(str(error).split())[:300]
        raise OptionError(
            f"the ranks do not synchronize: {words}; start them with torchrun or accelerate launch"
        ) from error
    try:
        _measure(asked, device, base)
    except WeaveError:
        raise
    except RuntimeError as error:
        if not _is_of_peers(error):
            raise
        words = " ".join(str(error).split())[:300]
        raise PeerTimeoutError(
            f"calibrate: another rank ended, or did not answer for {GROUP_TIMEOUT_S} s: {words}; start all ranks again"
        ) from error
    sys.stdout.flush()
    sys.stderr.flush()
    if device.type == "cuda":
        # An NCCL communicator that captured graphs have used may hang when it is destroyed.
        dist.barrier()
        torch.cuda.synchronize()
        os._exit(0)
    dist.destroy_process_group()
    return 0


def _is_of_peers(error: RuntimeError) -> bool:
    """True for what the library of a process group raises where a peer is gone. Gloo has no class of its own."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _check_families(only: Sequence[str], device: torch.device) -> None:
    from weaveopt.measure.cases import name_of
    from weaveopt.measure.suite import families_on

    known = [name_of(family) for family in families_on(device.type)]
    for name in only:
        if name not in known:
            raise OptionError(f"--only {name}: on {device.type} ranks there are {', '.join(known)}")


def _loaded(base: str) -> Machine:
    from weaveopt import cost_model

    try:
        return cost_model.load(base)
    except ProfileError as error:
        raise OptionError(f"--base {base}: {error}") from None


def _base(asked: str, device: torch.device) -> Machine:
    """The profile to renew, before anything is measured."""
    from weaveopt.measure import base, draft

    found = _loaded(asked)
    base.accept(asked, found, device.type, draft.wiring(device))
    return found


def _measure(asked: CalibrateArguments, device: torch.device, base: Machine | None) -> None:
    import torch.distributed as dist

    from weaveopt import cost_model
    from weaveopt.fabrics import topology
    from weaveopt.measure.base import renew
    from weaveopt.measure.session import CalibrationSession
    from weaveopt.measure.suite import measure, measure_between_hosts
    from weaveopt.measure.unfinished import open_run

    allowed = resolve().fabrics
    rank, world = dist.get_rank(), dist.get_world_size()
    where = topology.discover(str(dist.distributed_c10d._get_default_group().group_name), GROUP_TIMEOUT_S)
    try:
        _check_hosts(base, asked.only, where.num_hosts)
    except OptionError:
        # Rank 0 may have the store, from which others still read what was discovered.
        topology.exchange(where.group.name, GROUP_TIMEOUT_S).settle()
        raise
    started, unfinished = time.monotonic(), None
    output = _output(asked, device, where)
    name = asked.name or output.stem
    before = base or (cost_model.load(name) if name in cost_model.names() else None)
    with progress(rank == 0) as show_progress:
        session = CalibrationSession(device, show_progress, asked.quick)
        if base is not None and where.num_hosts > 1:
            machine = measure_between_hosts(session, where, name, base)
        else:
            unfinished = open_run(session)
            machine = measure(session, name, before, asked.only, unfinished)
    said = ""
    if where.num_hosts > 1:
        what = "the link between" if device.type == "cpu" else "the kernel and the library between"
        said = f"; {what} {counted(where.num_hosts, 'host')}, all else kept from {asked.base}"
    elif base is not None:
        renewed = renew(machine, base, allowed)
        machine, said = renewed.machine, f"; kept from {asked.base}: {', '.join(renewed.kept) or 'nothing'}"
    # Ranks of several hosts look into the folder of their own.
    if rank == 0 or (asked.output is None and where.hosts.index(where.hosts[where.group.rank]) == where.group.rank):
        _write(machine, output)
    if rank == 0:
        if unfinished is not None:
            unfinished.finish()
        ranks = counted(world, "rank")
        sys.stdout.write(f"{output}: {ranks} measured in {time.monotonic() - started:.0f} s{said}\n")


def _write(machine: Machine, output: Path) -> None:
    """Writes the profile at once: whoever reads the file meanwhile sees the old one or the new one."""
    from weaveopt import cost_model

    written = output.with_name(f".{output.name}.{os.getpid()}.json")
    try:
        written.write_text(cost_model.dumps(machine), encoding="utf-8")
        if _can_read_profiles():
            cost_model.load(str(written))
        written.replace(output)
    finally:
        written.unlink(missing_ok=True)


def _can_read_profiles() -> bool:
    """True if what reads profiles can be imported; a package that is there may lack one that it needs."""
    try:
        for name in ("jsonschema", "msgspec"):
            importlib.import_module(name)
    except ImportError:
        return False
    return True


def _check_hosts(base: Machine | None, only: Sequence[str], num_hosts: int) -> None:
    """Raise `OptionError` if ranks of several hosts cannot be measured."""
    if num_hosts > 1 and only:
        raise OptionError(f"--only: between {counted(num_hosts, 'host')} all is measured that there is")
    if num_hosts > 1 and base is None:
        raise OptionError(
            f"these ranks are on {counted(num_hosts, 'host')}: what is measured is what joins them, for a profile of "
            "one host: calibrate on one host first, then here with --base FILE"
        )


def _device(asked: str) -> torch.device:
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: torch finds no GPU")
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index, count = int(variable("LOCAL_RANK") or 0), torch.cuda.device_count()
    if index >= count:
        raise OptionError(
            f"{counted(count, 'GPU')} found for local rank {index}: start at most {counted(count, 'rank')} on this host"
        )
    return torch.device("cuda", index)
