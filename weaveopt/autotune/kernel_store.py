"""Times of local kernels on disk: one file a device and software, so that a second compile times nothing.

A file is replaced as a whole, and merged with what another process wrote in between. One that cannot be read counts as
empty; a folder that cannot be written costs the next process the same times again, and no compile.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from weaveopt import plain_json
from weaveopt.config import variable
from weaveopt.cost_model.timed import KernelShape, KernelTime

VERSION = 3
"""Raised where a time of one version would be wrong in the next."""
PREFIX, SUFFIX = "kernels-", ".json"
_LONGEST_LOCK_S = 0.5


def default_folder() -> Path:
    """`weaveopt` in the user's folder of caches."""
    base = variable("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~").expanduser() / ".cache") / "weaveopt"


def folder_of(named: str | None) -> Path:
    """The folder of that name (option `tune_cache`), else the user's."""
    return Path(named).expanduser() if named else default_folder()


@dataclass(frozen=True, order=True)
class LeftKernel:
    """A kernel that was left to the profile under a budget: only with a larger one is it tried again."""

    shape: KernelShape
    budget_s: float


@dataclass(frozen=True)
class StoredKernels:
    """Times by shape, and budgets by the shapes that were left."""

    times: Mapping[KernelShape, KernelTime]
    left: Mapping[KernelShape, float]

    def is_settled(self, shape: KernelShape, budget_s: float) -> bool:
        """True if a kernel need not be timed under this budget."""
        return shape in self.times or self.left.get(shape, -1.0) >= budget_s


@dataclass(frozen=True)
class StoredFile:
    """Content of a file."""

    version: int
    device: dict[str, str]
    kernels: tuple[KernelTime, ...]
    left: tuple[LeftKernel, ...] = ()


_NOTHING = StoredKernels({}, {})


@dataclass(frozen=True)
class KernelStore:
    """The times of one kind of device under one set of versions."""

    folder: Path
    device: Mapping[str, str]
    """Whatever a time depends on besides its kernel, by name."""

    @property
    def path(self) -> Path:
        words = json.dumps(dict(sorted(self.device.items())))
        return self.folder / f"{PREFIX}{hashlib.sha256(words.encode()).hexdigest()[:16]}{SUFFIX}"

    def read(self) -> StoredKernels:
        """The stored times; none where there is no file of this device and version that can be read."""
        found = content_of(self.path)
        if found is None or found.version != VERSION or found.device != dict(self.device):
            return _NOTHING
        times = {each.shape: each for each in found.kernels if each.us > 0.0}
        return StoredKernels(times, {each.shape: each.budget_s for each in found.left if each.shape not in times})

    def add(self, times: Iterable[KernelTime], left: Iterable[LeftKernel] = ()) -> bool:
        """Store these with those that are there; False where the folder cannot be written. Where those cannot be read,
        nothing is stored in their place."""
        if not can_read():
            return True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder / f"{self.path.name}.lock"):
                known = self.read()
                merged = {**known.times, **{each.shape: each for each in times}}
                every = {**known.left, **{each.shape: each.budget_s for each in left}}
                rest = sorted(LeftKernel(shape, budget_s) for shape, budget_s in every.items() if shape not in merged)
                content = StoredFile(VERSION, dict(self.device), tuple(sorted(merged.values())), tuple(rest))
                aside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
                aside.write_text(json.dumps(asdict(content)) + "\n", encoding="utf-8")
                aside.replace(self.path)
        except OSError:
            return False
        return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; after half a second go on without it, as whole files are replaced."""
    with path.open("a") as lock:
        ends = time.monotonic() + _LONGEST_LOCK_S
        while time.monotonic() < ends:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
        yield


def can_read() -> bool:
    """False where msgspec is missing, which reads the files."""
    return importlib.util.find_spec("msgspec") is not None


def content_of(path: Path) -> StoredFile | None:
    """Content of a file; None where there is none that can be read, and where msgspec is missing."""
    try:
        return plain_json.convert(plain_json.read(plain_json.text_of(path)), StoredFile)
    except (plain_json.JsonError, OSError, ImportError):
        return None


def stored(folder: Path) -> tuple[Path, ...]:
    """The files of times in a folder."""
    return tuple(sorted(folder.glob(f"{PREFIX}*{SUFFIX}")))


def wipe(folder: Path) -> int:
    """Delete all stored times; returns how many files that were. Raises `OSError` where one cannot be deleted."""
    found = stored(folder)
    for path in (*found, *folder.glob(f"{PREFIX}*.lock")):
        path.unlink(missing_ok=True)
    return len(found)
