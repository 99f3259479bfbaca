"""Profiles in the user's data folder: what `weaveopt calibrate` measured there is used on the same hardware.

A file's name says what it was measured on: device, link and number of ranks. Reading the folder raises nothing: a model
that runs without a profile runs with a broken one too, and says so in one line.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weaveopt.config import variable
from weaveopt.cost_model import Machine, load
from weaveopt.errors import ProfileError

NO_PEER_ACCESS = "no-peer-access"
"""Word of the name of a profile of GPUs that cannot map each other's memory."""
_RANKS = re.compile(r"-x(\d+)\.json$")
_DAY_S = 86400.0


@dataclass(frozen=True)
class UserProfile:
    """One file of the folder."""

    path: Path
    digest: str
    """Digest of its text; empty where it cannot be used."""
    age_days: float
    problem: str = ""
    """Why it cannot be used, in one line."""


def folder() -> Path:
    """`$XDG_DATA_HOME/weaveopt/profiles`, or the same in `~/.local/share`."""
    base = variable("XDG_DATA_HOME")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.local/share")) / "weaveopt" / "profiles"


def device_name(device: str) -> str:
    """Name of the hardware that ranks of this process compute on: `nvidia-h200`, `cpu-x86_64-2-cores`; empty where it
    cannot be asked."""
    if device == "cuda":
        import torch

        try:
            name = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "name", ""))
            return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        except (RuntimeError, AssertionError):  # a forked child of CPU ranks, on a host that has GPUs
            return ""
    return f"cpu-{platform.machine()}-{len(os.sched_getaffinity(0))}-cores"


def file_name(device: str, has_peer_access: bool, ranks: int) -> str:
    """Name of the profile of such a host; `device` as `device_name` returns it."""
    return f"{device}{'' if has_peer_access else f'-{NO_PEER_ACCESS}'}-x{ranks}.json"


def found() -> tuple[UserProfile, ...]:
    """Every profile in the folder, sorted by name, and what is wrong with those that cannot be used."""
    try:
        paths = sorted(path for path in folder().glob("*.json") if not path.name.startswith("."))
        return tuple(_examined(path) for path in paths)
    except OSError:  # no such folder, or one that may not be read
        return ()


def _examined(path: Path) -> UserProfile:
    try:
        changed = path.stat()
        digest, problem = _checked(path, changed.st_mtime_ns, changed.st_size)
    except OSError as error:
        return UserProfile(path, "", 0.0, str(error.strerror or error))
    return UserProfile(path, digest, max(time.time() - changed.st_mtime, 0.0) / _DAY_S, problem)


@cache
def _checked(path: Path, mtime_ns: int, size: int) -> tuple[str, str]:
    """(digest, problem) of a file as it was at that time; read once, warned of once."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        _loaded(path, digest)
    except (ProfileError, OSError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(f"weaveopt: this profile is not used: {first}", stacklevel=2)
        return "", first
    return digest, ""


@cache
def _loaded(path: Path, digest: str) -> Machine:
    return load(str(path))


def published() -> dict[str, str]:
    """Digests of the usable profiles by name, as a rank publishes them."""
    return {"profiles": json.dumps({each.path.name: each.digest for each in found() if not each.problem})}


@dataclass(frozen=True)
class CommonProfiles:
    """The profiles of the ranks of a group."""

    device: str = ""
    """Name of the hardware of all ranks; empty where they differ."""
    equal: tuple[tuple[str, str], ...] = ()
    """(name, digest) of the files that all ranks have."""
    other: tuple[str, ...] = ()
    """Names of files that not all ranks have, or not the same."""


def common(devices: Sequence[str], answers: Sequence[Mapping[str, str | int]]) -> CommonProfiles:
    """The profiles that ranks have in common, from those that each of them published."""
    every: list[dict[str, str]] = [json.loads(str(each["profiles"])) for each in answers]
    names = sorted({name for each in every for name in each})
    equal = tuple((name, every[0][name]) for name in names if len({each.get(name) for each in every}) == 1)
    other = tuple(name for name in names if name not in dict(equal))
    return CommonProfiles(devices[0] if len(set(devices)) == 1 else "", equal, other)


@dataclass(frozen=True)
class UserChoice:
    """The user's profile for some ranks, if there is one, and a line for the report where there could have been."""

    machine: Machine | None = None
    note: str = ""


def choose(groups: Sequence[CommonProfiles], has_peer_access: bool, ranks_per_host: int) -> UserChoice:
    """The profile that all ranks of all groups have of such a host: of those of as many ranks or more, the smallest."""
    devices = {each.device for each in groups}
    if len(devices) != 1 or "" in devices:
        return UserChoice()
    (device,) = devices
    everywhere = set.intersection(*(set(each.equal) for each in groups))
    anywhere = {name for each in groups for name in (*dict(each.equal), *each.other)}

    def of_such_a_host(name: str) -> bool:
        ranks = _ranks_of(name)
        return ranks >= ranks_per_host and name == file_name(device, has_peer_access, ranks)

    fitting = sorted((_ranks_of(name), name, digest) for name, digest in everywhere if of_such_a_host(name))
    if fitting:
        _, name, digest = fitting[0]
        try:
            return UserChoice(_loaded(folder() / name, digest))
        except (ProfileError, OSError):  # replaced since it was published; ranks compare constants before they rewrite
            return UserChoice(note=f"the profile {name} changed while the ranks compared it: the shipped one is used")
    apart = sorted(filter(of_such_a_host, anywhere))
    if not apart:
        return UserChoice()
    names = ", ".join(apart)
    return UserChoice(note=f"ranks have different profiles of their own ({names}), so the shipped one is used")


def _ranks_of(name: str) -> int:
    matched = _RANKS.search(name)
    return int(matched[1]) if matched else 0
