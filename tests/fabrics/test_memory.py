"""How much memory may still be taken: of the host, and of the control groups of either version. Files are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from weaveopt import _native

MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712
V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
V2 = "41 31 0:38 {top} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate"
Files = dict[str, str]


def group_v2(folder: str, current: int, most: int | None = None, high: int | None = None, cache: int = 0) -> Files:
    return {
        f"{folder}/memory.current": f"{current}\n",
        f"{folder}/memory.max": f"{'max' if most is None else most}\n",
        f"{folder}/memory.high": f"{'max' if high is None else high}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {cache}\nactive_file 0\n",
    }


def group_v1(folder: str, usage: int, limit: int = UNLIMITED_V1, cache: int = 0) -> Files:
    return {
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.stat": f"inactive_file 1\nactive_file 1\ntotal_inactive_file {cache - MIB}\n"
        f"total_active_file {MIB}\n",
    }


def make(root: Path, *files: Files, own: str = "", mounts: str = "", host: int = 100 * MIB) -> str:
    host_files = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {host // 1024} kB\nBuffers: 1 kB\n"}
    for group in (host_files, {"proc/self/cgroup": own, "proc/self/mountinfo": mounts}, *files):
        for name, text in group.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return str(root)


def found(root: str) -> tuple[int, str]:
    said = _native.available_memory(root)
    assert said is not None
    return said[0] // MIB, said[1].removeprefix(root)


TOP = "sys/fs/cgroup"
A_JOB = f"{TOP}/system.slice/job"


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ((), (100, "/proc/meminfo")),
        ((group_v2(A_JOB, current=30 * MIB, most=200 * MIB),), (100, "/proc/meminfo")),
        ((group_v2(A_JOB, current=30 * MIB, most=64 * MIB),), (34, f"/{A_JOB}/memory.max")),
        ((group_v2(A_JOB, current=30 * MIB, most=64 * MIB, cache=20 * MIB),), (54, f"/{A_JOB}/memory.max")),
        ((group_v2(A_JOB, current=30 * MIB, most=64 * MIB, high=40 * MIB),), (10, f"/{A_JOB}/memory.high")),
        ((group_v2(A_JOB, current=60 * MIB, high=64 * MIB),), (4, f"/{A_JOB}/memory.high")),
        (
            (group_v2(A_JOB, 30 * MIB, 64 * MIB), group_v2(f"{TOP}/system.slice", 90 * MIB, 98 * MIB)),
            (8, f"/{TOP}/system.slice/memory.max"),
        ),
        # What a container sees as the top has limits; that of the host has no such files.
        ((group_v2(TOP, current=MIB, most=4 * MIB),), (3, f"/{TOP}/memory.max")),
    ],
)
def test_the_smallest_limit_of_version_2_counts(tmp_path: Path, groups: tuple[Files, ...], wanted: object) -> None:
    root = make(tmp_path, *groups, own="0::/system.slice/job\n", mounts=V2.format(top="/") + "\n")
    assert found(root) == wanted


def test_the_smallest_limit_of_version_1_counts(tmp_path: Path) -> None:
    own = "9:name=systemd:/else\n4:cpu,memory:/docker/abc\n1:cpu:/else\n0::/else\n"
    memory = f"{TOP}/memory"
    files = group_v1(memory, 900 * MIB, cache=5 * MIB), group_v1(f"{memory}/docker/abc", 50 * MIB, 80 * MIB, 8 * MIB)
    root = make(tmp_path, *files, own=own, mounts=V1_CPU + "\n" + V1.format(top="/") + "\n")
    assert found(root) == (38, f"/{memory}/docker/abc/memory.limit_in_bytes")


def test_a_container_that_is_told_where_it_is_on_the_host(tmp_path: Path) -> None:
    """Its own group is mounted at the top, where the host's path leads nowhere."""
    limited = group_v1(f"{TOP}/memory", 50 * MIB, 80 * MIB, MIB)
    for number, own in enumerate(("4:memory:/docker/abc\n", "4:memory:/elsewhere\n")):
        root = make(tmp_path / str(number), limited, own=own, mounts=V1.format(top="/docker/abc") + "\n")
        assert found(root) == (31, f"/{TOP}/memory/memory.limit_in_bytes")


def test_nothing_is_known_where_nobody_says(tmp_path: Path) -> None:
    assert _native.available_memory(str(tmp_path)) is None
    here = _native.available_memory()
    assert here is not None and here[0] > MIB


def test_a_host_that_says_0_says_nothing(tmp_path: Path) -> None:
    """Sandboxes report 0, though gigabytes can be reserved."""
    assert _native.available_memory(make(tmp_path / "alone", host=0)) is None
    job = group_v2(A_JOB, current=30 * MIB, most=64 * MIB)
    root = make(tmp_path / "job", job, own="0::/system.slice/job\n", mounts=V2.format(top="/") + "\n", host=0)
    assert found(root) == (34, f"/{A_JOB}/memory.max")
    assert _native.Segment.create(3 * MIB, 1, 0, 2, make(tmp_path / "segment", host=0)).fd >= 0


def test_a_limit_that_leaves_nothing_says_nothing(tmp_path: Path) -> None:
    """Sandboxes have the files of a group that has no limit; a soft one may be exceeded."""
    jobs = (
        (group_v2(A_JOB, current=30 * MIB, most=0), 100),
        (group_v2(A_JOB, current=30 * MIB, most=30 * MIB, high=64 * MIB), 34),
        (group_v2(A_JOB, current=30 * MIB, most=0, high=0), 100),
        (group_v2(A_JOB, current=70 * MIB, most=90 * MIB, high=64 * MIB), 20),
    )
    for number, (job, left) in enumerate(jobs):
        root = make(tmp_path / str(number), job, own="0::/system.slice/job\n", mounts=V2.format(top="/") + "\n")
        assert found(root)[0] == left
    job = group_v1(f"{TOP}/memory/job", 50 * MIB, 50 * MIB, MIB)
    root = make(tmp_path / "v1", job, own="4:memory:/job\n", mounts=V1.format(top="/") + "\n", host=0)
    assert found(root) == (1, f"/{TOP}/memory/job/memory.limit_in_bytes"), "its cache can be taken back"


def test_a_segment_beyond_the_limit_is_an_error_with_the_number(tmp_path: Path) -> None:
    job = group_v2(A_JOB, current=30 * MIB, most=38 * MIB)
    root = make(tmp_path, job, own="0::/system.slice/job\n", mounts=V2.format(top="/") + "\n")
    with pytest.raises(
        RuntimeError, match=rf"reserve {9 * MIB + 4096} bytes .* 1 ranks: {8 * MIB} are available \(.*max"
    ):
        _native.Segment.create(9 * MIB, 1, 0, 1, root)
    assert _native.Segment.create(3 * MIB, 1, 0, 2, root).fd >= 0
    with pytest.raises(RuntimeError, match=f"on each of 2 ranks: {8 * MIB} are available"):
        _native.Segment.create(5 * MIB, 1, 0, 2, root)  # the other rank takes as much
