"""`weaveopt calibrate`: measures this machine, on all of its ranks, and writes a profile."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weaveopt.config import resolve, variable
from weaveopt.errors import OptionError, ProfileError
from weaveopt.wording import counted

if TYPE_CHECKING:
    import torch

    from weaveopt.cost_model import Machine
    from weaveopt.measure.session import ShowProgress

DEFAULT_OUTPUT = "weaveopt-profile.json"
GROUP_TIMEOUT_S = 300
MOST_CHARACTERS = 255
"""Length of a machine's name, as in the profile's schema."""
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# Multicast objects can put the GPUs of a shared host out of service; nothing that is measured uses them.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclass(frozen=True)
class CalibrateArguments:
    """The parsed command line."""

    output: Path
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
        "--output", type=Path, default=Path(DEFAULT_OUTPUT), metavar="FILE", help=f"default: {DEFAULT_OUTPUT}"
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
    folder = asked.output.absolute().parent
    if not os.path.isdir(folder):  # false too where one may not look
        raise OptionError(f"--output {asked.output}: no directory {folder}")
    if not os.access(folder, os.W_OK):  # now, and not after minutes of measuring
        raise OptionError(f"--output {asked.output}: {folder} is not writable")
    if os.path.isdir(asked.output):
        raise OptionError(f"--output {asked.output}: is a directory, expected a file")
    name = asked.name or asked.output.stem
    if not name.isprintable() or len(name) > MOST_CHARACTERS:
        raise OptionError(f"--name {name[:40]!r}: expected at most {MOST_CHARACTERS} characters, none of control")
    if asked.only and asked.base is None:
        raise OptionError("--only measures a part of a profile: name the profile to renew with --base NAME|FILE")
    if asked.base is not None:
        _loaded(asked.base)
    _check_ranks(asked)
    return asked


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
    _measure(asked, device, base)
    sys.stdout.flush()
    sys.stderr.flush()
    if device.type == "cuda":
        # An NCCL communicator that captured graphs have used may hang when it is destroyed.
        dist.barrier()
        torch.cuda.synchronize()
        os._exit(0)
    dist.destroy_process_group()
    return 0


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

    allowed = resolve().fabrics
    rank, world = dist.get_rank(), dist.get_world_size()
    where = topology.discover(str(dist.distributed_c10d._get_default_group().group_name), GROUP_TIMEOUT_S)
    try:
        _check_hosts(base, asked.only, where.num_hosts)
    except OptionError:
        # Rank 0 may have the store, from which others still read what was discovered.
        topology.exchange(where.group.name, GROUP_TIMEOUT_S).settle()
        raise
    started = time.monotonic()
    name = asked.name or asked.output.stem
    before = base or (cost_model.load(name) if name in cost_model.names() else None)
    with _progress(rank == 0) as show_progress:
        session = CalibrationSession(device, show_progress, asked.quick)
        if base is not None and where.num_hosts > 1:
            machine = measure_between_hosts(session, where, name, base)
        else:
            machine = measure(session, name, before, asked.only)
    said = ""
    if where.num_hosts > 1:
        what = "the link between" if device.type == "cpu" else "the kernel and the library between"
        said = f"; {what} {counted(where.num_hosts, 'host')}, all else kept from {asked.base}"
    elif base is not None:
        renewed = renew(machine, base, allowed)
        machine, said = renewed.machine, f"; kept from {asked.base}: {', '.join(renewed.kept) or 'nothing'}"
    if rank == 0:
        text = cost_model.dumps(machine)
        unfinished = asked.output.with_name(f".{asked.output.name}.{os.getpid()}.json")
        try:
            unfinished.write_text(text, encoding="utf-8")
            if all(importlib.util.find_spec(name) for name in ("jsonschema", "msgspec")):
                cost_model.load(str(unfinished))
            unfinished.replace(asked.output)
        finally:
            unfinished.unlink(missing_ok=True)
        ranks = counted(world, "rank")
        sys.stdout.write(f"{asked.output}: {ranks} measured in {time.monotonic() - started:.0f} s{said}\n")


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


@contextmanager
def _progress(shown: bool) -> Iterator[ShowProgress]:
    """A bar on standard error for each kind of measurement, in a file a line; on other ranks nothing."""
    if not shown:
        yield lambda what, done, total: None
        return
    if not sys.stderr.isatty():
        reported: set[str] = set()

        def say(what: str, done: int, total: int) -> None:
            if what not in reported:
                print(f"weaveopt: measuring {what}", file=sys.stderr, flush=True)
                reported.add(what)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:36}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, tuple[TaskID, int]] = {}

        def finish() -> None:
            for task, total in tasks.values():
                bars.update(task, completed=total)

        def show_progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                finish()
                tasks[what] = bars.add_task(what, total=total), total
            bars.update(tasks[what][0], completed=done)

        yield show_progress
        finish()
