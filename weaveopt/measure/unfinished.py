"""Samples of a calibration that has not ended: a killed run leaves them, and the next one begins where it was.

Rank 0 keeps every family of measurements as it is after each of its cases (one group size, or the ranks by themselves),
under a key of the machine, its ranks and all versions: another machine or version measures all anew.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

import weaveopt
from weaveopt.config import variable
from weaveopt.fabrics import user_profiles
from weaveopt.measure.cases import FAMILIES, name_of
from weaveopt.measure.cases.family import Family
from weaveopt.measure.cases.launch import Launches
from weaveopt.measure.session import CalibrationSession

LONGEST_S = 86400.0
"""Samples that are older are taken anew: a profile says of one day when it was measured."""
ALONE = 0
"""Case of what ranks measure by themselves, in place of a group's size."""
_SAFE = frozenset({("collections", "defaultdict"), ("collections", "OrderedDict"), ("collections", "Counter")})
_BUILTINS = frozenset({"set", "frozenset", "list", "dict", "tuple", "complex", "bytearray", "slice", "range"})


class _Samples(pickle.Unpickler):
    """Reads records of this package and plain containers; a file that names anything else is not read."""

    def find_class(self, module: str, name: str) -> object:
        known = module.startswith("weaveopt.") or (module, name) in _SAFE
        found = super().find_class(module, name) if known or (module == "builtins" and name in _BUILTINS) else None
        if not isinstance(found, type):
            raise pickle.UnpicklingError(f"{module}.{name} is no record of measurements")
        return found


@dataclass
class UnfinishedRun:
    """Samples that were taken so far, the same on all ranks; rank 0 writes them."""

    path: Path | None
    """None: nothing is kept."""
    families: dict[str, tuple[tuple[int, ...], Family]] = field(default_factory=dict)
    """Name -> the cases that were measured, and the family with their samples."""

    def known(self, family: Family) -> Family:
        """The family with what an earlier run measured of it."""
        found = self.families.get(name_of(type(family)))
        return family if found is None else found[1]

    def has(self, family: Family, case: int) -> bool:
        """True if an earlier run measured this case."""
        return case in self.families.get(name_of(type(family)), ((), family))[0]

    def keep(self, family: Family, case: int) -> None:
        """Add a case that was measured, and write all of them at once: a reader sees the file before or after."""
        if self.path is None or isinstance(family, Launches):
            return
        name = name_of(type(family))
        cases = self.families.get(name, ((), family))[0]
        self.families[name] = ((*cases, case), family)
        written = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            written.write_bytes(pickle.dumps(self.families))
            written.replace(self.path)
        except OSError as error:
            print(f"weaveopt: {self.path.parent}: {error.strerror}: a killed run would begin anew", file=sys.stderr)
            self.path = None

    def finish(self) -> None:
        """Drop the samples of a run that ended: they are in a profile."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def open_run(session: CalibrationSession) -> UnfinishedRun:
    """The samples that a killed run on the same machine left, on every rank; none where there are none, or the file is
    broken. All ranks call it."""
    box: list[UnfinishedRun] = [UnfinishedRun(None)]
    if session.rank == 0:
        box = [_read(user_profiles.folder().parent / "unfinished" / f"{_key(session)}.pickle")]
    dist.broadcast_object_list(box, src=0)
    found = box[0]
    return found if session.rank == 0 else UnfinishedRun(None, found.families)


def _key(session: CalibrationSession) -> str:
    """Digest of everything that times depend on."""
    words = (
        user_profiles.device_name(session.device.type), session.world, session.quick, torch.__version__,
        torch.version.cuda, weaveopt.__version__, variable("WEAVE_FABRICS"),
    )  # fmt: skip
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]


def _read(path: Path) -> UnfinishedRun:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_bytes()
        if time.time() - path.stat().st_mtime > LONGEST_S:
            return UnfinishedRun(path)
    except FileNotFoundError:
        return UnfinishedRun(path)
    except OSError:
        return UnfinishedRun(None)
    try:
        families = _Samples(io.BytesIO(text)).load()
        assert all(type(each) in FAMILIES for _, each in families.values())
    except Exception:  # cut off, of another version, or not ours
        print(f"weaveopt: {path}: not what a killed run left, so all is measured anew", file=sys.stderr)
        return UnfinishedRun(path)
    found = cast(dict[str, tuple[tuple[int, ...], Family]], families)
    cases = sum(len(cases) for cases, _ in found.values())
    print(f"weaveopt: {cases} kinds of measurements are those of a run that was killed ({path})", file=sys.stderr)
    return UnfinishedRun(path, found)
