"""Results of ranks on hosts whose links are late and lose, double or cut packets: those without, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.emulation.emulated_hosts import ROOT, Link, hosts, missing
from tests.ranks import run_ranks
from tests.ranks.tcp_ranks import NUM_RESULTS, check

LINKS = {
    "late": Link(delay_us=50, gbit_per_s=10),
    "lossy": Link(delay_us=20, loss_percent=5, retry_ms=10),
    "doubled": Link(delay_us=20, duplicate_percent=20),
    "cut": Link(delay_us=20, truncate_percent=5, retry_ms=10),
    "overtaken": Link(delay_us=20, reorder_percent=10),
}
COUNTED = {"lossy": "lost", "doubled": "duplicated", "cut": "truncated", "overtaken": "reordered"}


def needs(link: Link) -> None:
    if why := missing(link, changing=True):
        pytest.skip(why)


@pytest.fixture(scope="module")
def without_hosts() -> list[bytes]:
    """Results of ranks on this machine whose topology claims several hosts."""
    return run_ranks(check, 4, 4, 2)[0]


@pytest.mark.parametrize("name", LINKS)
def test_results_are_those_without_links(name: str, without_hosts: list[bytes]) -> None:
    link = LINKS[name]
    needs(link)
    with hosts(2, link, changing=True) as made:
        found = run_ranks(check, 4, 4, 2, network=made)
        counts = made.counts()
    assert len(without_hosts) == NUM_RESULTS and all(each == without_hosts for each in found)
    assert counts["carried"] > 1000
    assert name not in COUNTED or counts[COUNTED[name]] > 10


def test_hosts_and_all_that_runs_on_them_end_with_the_process_that_made_them(tmp_path: Path) -> None:
    needs(Link())
    script = (
        "import subprocess, sys, time\n"
        "from tests.emulation.emulated_hosts import Link, hosts\n"
        "with hosts(2, Link(delay_us=10), changing=True) as made:\n"
        "    child = subprocess.Popen(made[1].command('sleep', '600'))\n"
        "    print(made.relay_pid, child.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    made = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    with made.stdout:
        relay, child = map(int, made.stdout.readline().split())
    own = os.stat("/proc/self/ns/net").st_ino
    deadline = time.monotonic() + 10
    while os.stat(f"/proc/{child}/ns/net").st_ino == own:
        assert time.monotonic() < deadline, "the child did not enter its host"
        time.sleep(0.02)
    os.kill(made.pid, signal.SIGKILL)
    made.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(_runs(pid) for pid in (relay, child)):
        time.sleep(0.02)
    assert not _runs(relay) and not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
