"""`weaveopt doctor`: versions, compiler, memory and fabrics of this host, and what to do about what is missing."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from weaveopt import versions
from weaveopt.config import variable
from weaveopt.versions import Supported
from weaveopt.wording import counted

SHM = Path("/dev/shm")
SHM_COMFORT_BYTES = 512 << 20
"""A group of two ranks with 8192 tokens of hidden size 8192 in bf16 keeps about this much there."""


class Status(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works, but not as well as it could."""
    MISSING = "missing"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `advice` is empty where nothing needs doing."""

    name: str
    status: Status
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("table", "json"), default="table")


def run(form: str) -> int:
    """Print every check. Returns 0 if `backend="weave"` can run here on shared memory at least, else 1."""
    checks = examine()
    usable = all(check.status is not Status.MISSING for check in checks if check.name in NEEDED)
    if form == "json":
        print(json.dumps({"usable": usable, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        sys.stdout.write(text(checks, usable))
    return 0 if usable else 1


NEEDED = (
    "python",
    "torch",
    "transformers",
    "weaveopt",
    "backend entry point",
    "native part",
    "shared memory",
    "fabric shm",
)


def examine() -> tuple[Check, ...]:
    return (
        _version("weaveopt"),
        *map(_supported, versions.SUPPORTED),
        _compiler(),
        _entry_point(),
        _native(),
        _shared_memory(),
        _cores(),
        _cuda(),
        _cuda_part(),
        _nvshmem_part(),
        _profile(),
        *_user_profiles(),
        *_fabrics(),
    )


def _version(package: str) -> Check:
    try:
        return Check(package, Status.OK, metadata.version(package))
    except metadata.PackageNotFoundError:
        return Check(package, Status.MISSING, "not installed", "pip install .")


def _supported(package: Supported) -> Check:
    """The installed version against the table: too old is missing, never tested a note."""
    is_python = package is versions.PYTHON
    wanted = (
        f"weaveopt needs Python {package.least} or later"
        if is_python
        else f"pip install '{package.name}>={package.least}'"
    )
    absent = Status.NOTE if package is versions.ACCELERATE else Status.MISSING
    try:
        found = platform.python_version() if is_python else metadata.version(package.name)
    except metadata.PackageNotFoundError:
        return Check(package.name, absent, "not installed", wanted)
    if not versions.at_least(found, package.least):
        return Check(package.name, absent, found, wanted)
    note = versions.untested(package, found)
    if note is None:
        return Check(package.name, Status.OK, found)
    return Check(package.name, Status.NOTE, f"{found}: {note}", "before relying on it run make test with this version")


def _compiler() -> Check:
    name = variable("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), "")
    path = shutil.which(name) if name else None
    if path is None:
        return Check(
            "compiler",
            Status.NOTE,
            f"{name or 'g++'} not found",
            "install g++: Inductor needs it for CPU code, and so does a build from source",
        )
    try:
        lines = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return Check("compiler", Status.NOTE, f"{path} does not run: {type(error).__name__}", "repair it or set CXX")
    return Check("compiler", Status.OK, lines[0] if lines else path)


def _entry_point() -> Check:
    found = [entry for entry in metadata.entry_points(group="torch_dynamo_backends") if entry.name == "weave"]
    if found:
        return Check("backend entry point", Status.OK, found[0].value)
    return Check(
        "backend entry point",
        Status.MISSING,
        "not registered",
        "install the package: pip install . (a bare source tree on the path registers nothing)",
    )


def _native() -> Check:
    if importlib.util.find_spec("weaveopt._native") is None:
        return Check(
            "native part",
            Status.MISSING,
            "not built",
            "build it with g++ installed: pip install --no-build-isolation --no-deps -e .",
        )
    try:
        module = importlib.import_module("weaveopt._native")
    except ImportError as error:
        return Check(
            "native part",
            Status.MISSING,
            f"does not load: {error}",
            "build it anew: pip install --force-reinstall --no-deps .",
        )
    return Check("native part", Status.OK, Path(str(module.__file__)).name)


def _shared_memory() -> Check:
    if not SHM.is_dir() or not os.access(SHM, os.W_OK):
        return Check(
            "shared memory",
            Status.MISSING,
            f"{SHM} is not writable",
            "mount a tmpfs there (containers: --shm-size or --ipc=host)",
        )
    stat = os.statvfs(SHM)
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"{SHM}: {_mib(size)} MiB, {_mib(free)} MiB free"
    if free < SHM_COMFORT_BYTES:
        return Check(
            "shared memory", Status.NOTE, found, "large models need more: containers --shm-size=2g or --ipc=host"
        )
    return Check("shared memory", Status.OK, found)


def _mib(num_bytes: int) -> int:
    return num_bytes >> 20


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    found = counted(cores, "usable core")
    local = variable("LOCAL_WORLD_SIZE")
    if local.isdecimal() and int(local) > cores:
        return Check(
            "cores",
            Status.NOTE,
            f"{found}, {counted(int(local), 'rank')} on this host",
            f"launch at most {counted(cores, 'CPU rank')} here",
        )
    if cores < 2:
        return Check("cores", Status.NOTE, found, "CPU ranks will take turns on one core")
    return Check("cores", Status.OK, f"{found}: launch at most {counted(cores, 'CPU rank')} here")


def _cuda() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check("cuda", Status.NOTE, f"torch does not load: {error}")
    if not torch.cuda.is_available():
        advice = "only CPU ranks can run here; GPUs need a driver and a CUDA build of torch"
        return Check("cuda", Status.NOTE, "no usable GPU", advice)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("cuda", Status.OK, f"{counted(len(names), 'GPU')}: {', '.join(sorted(set(names)))}")


def _cuda_part() -> Check:
    """Check that the GPU kernels were built, and for the GPUs of this host."""
    try:
        import torch

        from weaveopt import _native
    except ImportError as error:
        return Check("cuda part", Status.NOTE, f"cannot be examined: {error}", "repair what is missing above")
    present = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    archs = sorted({"".join(map(str, torch.cuda.get_device_capability(i))) for i in present})
    rebuild = f"WEAVE_CUDA_ARCHS='{';'.join(archs)}' pip install --no-build-isolation --no-deps -e ."
    if not _native.has_cuda:
        advice = f"build it where nvcc is found: {rebuild}" if archs else ""
        return Check("cuda part", Status.NOTE, "left out of this build", advice)
    found = f"built for {_native.CUDA_ARCHS}"
    if not all(map(_native.has_code, present)):
        return Check("cuda part", Status.NOTE, f"{found}, not for every GPU here", rebuild)
    return Check("cuda part", Status.OK, found)


def _nvshmem_part() -> Check:
    """Check that the module for GPUs of several hosts was built, and that it finds NVSHMEM's library."""
    name = "nvshmem part"
    rebuild = "pip install nvidia-nvshmem-cu13, then pip install --no-build-isolation --no-deps -e . where nvcc is"
    if importlib.util.find_spec("weaveopt._nvshmem") is None:
        return Check(name, Status.NOTE, "left out of this build: GPUs of several hosts use the library", rebuild)
    try:
        from weaveopt.fabrics import nvshmem

        found = f"built with NVSHMEM {nvshmem.module().version()}"
    except ImportError as error:
        return Check(name, Status.NOTE, f"does not load: {error}", rebuild)
    return Check(name, Status.OK, found)


def _profile() -> Check:
    """Check which machine profile the GPUs of this host get if none is named."""
    name = "machine profile"
    try:
        import torch

        from weaveopt import cost_model
        from weaveopt.fabrics import gpus, user_profiles
    except ImportError as error:
        return Check(name, Status.NOTE, f"cannot be examined: {error}", "repair what is missing above")
    named = variable("WEAVE_MACHINE")
    if named:
        return Check(name, Status.OK, f"{named} (WEAVE_MACHINE)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hardware = user_profiles.device_name(device)
    own = [each for each in user_profiles.found() if each.path.name.startswith(f"{hardware}-") and not each.problem]
    if own:
        return Check(name, Status.OK, f"measured here: {', '.join(each.path.stem for each in own)}")
    if device == "cpu":
        return Check(name, Status.OK, "cpu")
    found = gpus.gpus_of([gpus.describe(index) for index in range(torch.cuda.device_count())])
    if not found:
        return Check(name, Status.NOTE, "the GPUs of this host could not be asked for their names")
    choice = cost_model.choose(found, len(found), has_peer_access=gpus.pair_without_access() is None)
    if not choice.stands_in_for:
        return Check(name, Status.OK, choice.machine.name)
    return Check(
        name,
        Status.NOTE,
        f"none of {', '.join(choice.stands_in_for)} ({choice.machine.name} stands in): nothing that communicates is "
        "rewritten there",
        "measure it: torchrun --nproc-per-node N -m weaveopt calibrate",
    )


def _user_profiles() -> Iterator[Check]:
    """One check for each profile in the user's data folder: how old it is, and whether it can be used."""
    try:
        from weaveopt.fabrics import user_profiles
    except ImportError:  # the check before reports it
        return
    for each in user_profiles.found():
        name, age = f"profile {each.path.name}", f"{each.age_days:.0f} days old"
        if each.problem:
            yield Check(name, Status.NOTE, f"not used: {each.problem}", f"calibrate anew, or rm {each.path}")
        else:
            yield Check(name, Status.OK, f"{each.path}: {age}")


def _fabrics() -> tuple[Check, ...]:
    """One check for each fabric, as two ranks of this host would find it, or of two such hosts."""
    try:
        import torch
        import torch.distributed as dist

        from weaveopt.fabrics import gpus
        from weaveopt.fabrics.topology import Group, Topology
        from weaveopt.fabrics.traits import TRAITS, NativePart
        from weaveopt.records.candidate import Fabric
    except ImportError as error:
        return (Check("fabric shm", Status.MISSING, f"cannot be examined: {error}", "repair what is missing above"),)
    checks = []
    for fabric in Fabric:
        name = f"fabric {fabric.value}"
        device = TRAITS[fabric].device
        if device is None:
            backends = [
                b for b, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there
            ]
            advice = "" if backends else "install a torch with gloo or nccl"
            checks.append(
                Check(name, Status.OK if backends else Status.MISSING, ", ".join(backends) or "no backend", advice)
            )
            continue
        on_gpus = device == "cuda"
        if on_gpus and not torch.cuda.is_available():
            checks.append(Check(name, Status.NOTE, "joins GPUs; there is none"))
            continue
        without_access = gpus.pair_without_access() if on_gpus else None
        hosts = ("here", "here") if TRAITS[fabric].within_host else ("here", "there")
        described = [gpus.describe(index) for index in range(torch.cuda.device_count())] if on_gpus else []
        refused = gpus.no_multicast(described, range(len(described)))
        here = Topology(
            Group("0", (0, 1), 0), hosts, device, no_peer_access=without_access, no_multicast=refused,
            no_host_memory=gpus.no_host_memory(described, range(len(described))),
        )  # fmt: skip
        rejection = dict(here.fabrics())[fabric]
        if rejection is None:
            reached = "reaches every rank of this host" if here.num_hosts == 1 else "joins ranks of several hosts"
            if TRAITS[fabric].needs_multicast:
                reached += "; its kernels never ran on hardware: their first calls are checked"
            if TRAITS[fabric].measured_only:
                reached += "; used where GPUs have no peer access, under a profile that has times of it"
            checks.append(Check(name, Status.OK, reached))
        else:
            status = Status.NOTE if on_gpus else Status.MISSING
            advice = "see the native part above" if rejection.code == NativePart.HOST.code else ""
            values = ", ".join(f"{word} {value}" for word, value in rejection.values)
            found = f"{rejection.code}: {rejection.message}" + (f" ({values})" if values else "")
            checks.append(Check(name, status, found, advice))
    return tuple(checks)


def text(checks: tuple[Check, ...], usable: bool) -> str:
    """A table of the checks, then the verdict."""
    from rich.table import Table
    from rich.text import Text

    from weaveopt.reporting.terminal import to_text, width_of

    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        found = f"{check.found}\n-> {check.advice}" if check.advice else check.found
        table.add_row(check.status.value, check.name, Text(found))
    verdict = (
        "usable: CPU ranks of this host can run backend='weave'"
        if usable
        else "not usable yet: see what is missing above"
    )
    return to_text(table, width_of(sys.stdout)) + verdict + "\n"
