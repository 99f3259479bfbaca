"""Everything that a rank may say when its group fails. Nothing else may be said."""

from __future__ import annotations

import re
from enum import Enum

from tests.faults.case import Case

_OP = r"weave::\w+ at site \S+, group '\S+', rank {rank}: "
_SLOT = r" \(slot (ready|rows), expected epoch \d+, seen \d+\)"
_GROUP = r"group '\S+': "
_SHARE = rf"ArenaError: {_GROUP}cannot share \d+ bytes per rank: "
_DIFFER = rf"AgreementError: {_GROUP}ranks \d+ and \d+ differ in "


class Saying(Enum):
    """Errors that a rank may end with, each a pattern of the whole text. `{rank}` is its number."""

    RIGHT = ""
    """Every step gave the right result."""
    EXITED = rf"PeerTimeoutError: {_OP}peer rank {{victim}} exited{_SLOT}"
    OTHER_EXITED = rf"PeerTimeoutError: {_OP}peer rank \d+ exited{_SLOT}"
    """A survivor that heard of it first, and ended."""
    GAVE_UP = rf"PeerTimeoutError: {_OP}peer rank \d+ gave up waiting itself{_SLOT}"
    GAVE_UP_ALONE = (
        rf"PeerTimeoutError: {_OP}peer rank {{victim}} (gave up waiting itself|exited){_SLOT}\. It said: group .+"
    )
    """It compiled a graph alone, and reported that."""
    LATE = rf"PeerTimeoutError: {_OP}peer rank {{victim}} did not signal within [\d.]+ s{_SLOT}"
    OTHER_LATE = rf"PeerTimeoutError: {_OP}peer rank \d+ did not signal within [\d.]+ s{_SLOT}"
    ABSENT = (
        rf"AgreementError: {_GROUP}rank {{victim}} of \([\d, ]+\) (did not come within [\d.]+ s for|ended before) .+"
    )
    OTHERS_ABSENT = rf"AgreementError: {_GROUP}ranks? [\d, ]+ of \([\d, ]+\) did not come within [\d.]+ s for .+"
    STORE_LOST = rf"AgreementError: {_GROUP}the store failed while ranks synchronized for .+"
    STORE_SILENT = rf"AgreementError: {_GROUP}the store did not answer within [\d.]+ s for .+"
    NO_SPACE = rf"{_SHARE}rank {{victim}}: cannot reserve \d+ bytes .*in /dev/shm \(No space left on device\) .*"
    NO_DESCRIPTORS = rf"{_SHARE}rank {{victim}}: cannot reserve \d+ bytes .*in /dev/shm \(Too many open files\) .*"
    TOO_LARGE = rf"{_SHARE}rank {{victim}}: cannot reserve \d+ bytes .*in /dev/shm \(File too large\) .*"
    NO_MEMORY = rf"{_SHARE}rank {{victim}}: cannot reserve \d+ bytes .*are available \(.*memory.*\)"
    NOT_MAPPED = rf"{_SHARE}rank \d+: the memory of rank {{victim}}: cannot open /proc/\S+: Permission denied.*"
    GONE = rf"{_SHARE}rank \d+: the memory of rank {{victim}}: cannot open /proc/\S+: No such file or directory.*"
    OPTION_DIFFERS = rf"{_DIFFER}option max_tokens: rank \d+ has \d+, rank \d+ has \d+\. Start all ranks with .+"
    VERSION_DIFFERS = rf"{_DIFFER}version of weaveopt: .+"
    PROFILE_DIFFERS = rf"{_DIFFER}constants of the machine profile: .+"
    ALONE = rf"AgreementError: {_GROUP}rank {{victim}} compiled a graph alone whose plan was never agreed on: .+"
    RESIDUAL_DIFFERS = (
        r"AgreementError: weave::\w+ at site \S+: the residual on rank \d+ is not the one on rank \d+\. .+"
    )
    MEETINGS_DIFFER = rf"AgreementError: {_GROUP}rank \d+ is at '.+' while rank \d+ is at '.+': ranks of a .+"
    CALLS_DIFFER = rf"AgreementError: {_OP}runs site .+, but rank \d+ runs (?:a )?site .+{_SLOT}: .+"
    NO_ARENA = r"ArenaError: no arena was reserved for group '\S+': reserve\(\) comes before the first call"
    NO_GROUP = r"ValueError: Unsupported group type: <class 'NoneType'>, None"
    """Torch's own, at a collective without a group."""
    CLOSED = (
        rf"{_SHARE}rank {{rank}}: the memory of rank \d+: (cannot open /proc/\S+: No such (file or directory|device or "
        r"address)|/proc/\S+: (has \d+ bytes, expected \d+|is not the segment that its owner announced))"
    )
    """Error of a rank that arrives after its peers have ended, or use the descriptor for something else."""

    @property
    def phrase(self) -> str:
        """For the table."""
        return _PHRASES[self.name]

    def matches(self, error: str, case: Case, rank: int) -> bool:
        pattern = self.value.replace("{victim}", str(case.victim)).replace("{rank}", str(rank))
        return re.fullmatch(pattern, error) is not None


UNUSABLE = re.compile(r"\w+Error: .*the arena is unusable since an earlier call failed\. .+")
"""Every later call in an arena in which one failed."""

_NOT_SHARED = "`ArenaError` with the rank and the reason"
_DIFFERENT = "`AgreementError` with two ranks and both"
_PHRASES = {
    "RIGHT": "the right result",
    "EXITED": "`PeerTimeoutError`: the rank exited",
    "OTHER_EXITED": "`PeerTimeoutError`: a survivor exited",
    "GAVE_UP": "`PeerTimeoutError`: a survivor gave up",
    "GAVE_UP_ALONE": "`PeerTimeoutError` with the rank that compiled alone, and its guard",
    "LATE": "`PeerTimeoutError`: the rank did not signal",
    "OTHER_LATE": "`PeerTimeoutError`: a survivor did not signal",
    "ABSENT": "`AgreementError`: the rank did not come",
    "OTHERS_ABSENT": "`AgreementError`: the others did not come",
    "STORE_LOST": "`AgreementError`: the store failed",
    "STORE_SILENT": "`AgreementError`: the store did not answer",
    "NO_SPACE": f"{_NOT_SHARED} (no space)",
    "NO_DESCRIPTORS": f"{_NOT_SHARED} (too many open files)",
    "TOO_LARGE": f"{_NOT_SHARED} (file too large)",
    "NO_MEMORY": f"{_NOT_SHARED} (the control group's file)",
    "NOT_MAPPED": f"{_NOT_SHARED} (permission denied)",
    "GONE": f"{_NOT_SHARED} (no such file)",
    "CLOSED": f"{_NOT_SHARED} (no such file)",
    "OPTION_DIFFERS": f"{_DIFFERENT} values of the option",
    "VERSION_DIFFERS": f"{_DIFFERENT} versions",
    "PROFILE_DIFFERS": f"{_DIFFERENT} digests of the profile",
    "ALONE": "`AgreementError` with the rank, its peers and the guard",
    "RESIDUAL_DIFFERS": "`AgreementError` with site and ranks",
    "MEETINGS_DIFFER": "`AgreementError` with what both ranks wanted to synchronize for",
    "CALLS_DIFFER": "`AgreementError` with both ranks' site and token count",
    "NO_ARENA": "`ArenaError`: no arena was reserved",
    "NO_GROUP": "torch's `ValueError`: no group",
}
