"""Hosts on one machine: network namespaces, with the delay, rate and loss of real links between them.

    python -m tests.emulation.emulated_hosts --hosts 2 --delay-us 50 --gbit 10     makes some and measures them

A namespace has an address of its own and shares nothing of the network with the others; file system, process numbers
and memory are the machine's, so ranks say which host they are on (`WEAVE_HOST`). Links that are only slow are a bridge
with token buckets; those with delay or loss are the kernel's `netem` where it has that, and else, or where they are to
be changed while they run, a relay of TUN devices (tests/hosts/relay.py). Needs root and `ip`; `missing()` says what is
not there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.hosts.link import Link
from tests.hosts.relay import INTERFACE, address_of, control_name, enter

__all__ = ["Host", "Link", "Network", "finish", "hosts", "missing", "start"]

PORT = 29400
ROOT = Path(__file__).resolve().parents[2]
_ENDS_S = 10.0
_PLAIN = Link()


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    namespace: str
    """A path that leads to it, as long as the hosts are there."""
    interface: str = INTERFACE

    def command(self, *words: str) -> list[str]:
        """`words`, run on the host."""
        return ["nsenter", f"--net={self.namespace}", *words]

    def enter(self) -> None:
        """Moves the calling thread, and those that it starts, onto the host."""
        descriptor = os.open(self.namespace, os.O_RDONLY)
        try:
            enter(descriptor)
        finally:
            os.close(descriptor)

    def environment(self, first: Host) -> dict[str, str]:
        """Environment of the ranks of the host, without their rank numbers."""
        return {
            "MASTER_ADDR": first.address, "MASTER_PORT": str(PORT), "WEAVE_HOST": self.name,
            "GLOO_SOCKET_IFNAME": self.interface,
        }  # fmt: skip


@dataclass(frozen=True)
class Network(Sequence[Host]):
    """Hosts, and what can be done to the links between them from any process, on a host or not. Pickles."""

    hosts: tuple[Host, ...]
    relay_pid: int
    is_relayed: bool
    own_us: float
    """Least time of the relay itself for a packet. It is part of the delay, as far as that reaches."""

    def __len__(self) -> int:
        return len(self.hosts)

    def __getitem__(self, index: int) -> Host:  # type: ignore[override]
        return self.hosts[index]

    def counts(self) -> dict[str, int]:
        """Packets since the hosts were made: `tests.hosts.link.Counts`."""
        return self._change()

    def down(self, host: int) -> None:
        """No packet leaves or reaches it any more, without any notice: a cable that is cut."""
        self._change(down=host)

    def up(self, host: int) -> None:
        self._change(up=host)

    def lose(self, percent: float) -> None:
        self._change(loss_percent=percent)

    def truncate(self, packets: int) -> None:
        """So many of the next packets that carry data lose half of it."""
        self._change(truncate=packets)

    def duplicate(self, packets: int) -> None:
        self._change(duplicate=packets)

    def kill(self, host: int) -> int:
        """SIGKILL to all that runs on it, at once; how many processes that were."""
        return self._change(kill=host)["killed"]

    def _change(self, **what: float) -> dict[str, int]:
        if not self.is_relayed and "kill" not in what:
            raise RuntimeError("links of the kernel cannot be changed: ask hosts(..., changing=True)")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
            control.settimeout(_ENDS_S)
            control.connect(control_name(self.relay_pid))
            control.sendall(json.dumps(what).encode())
            answer = control.recv(4096)
        if not answer:
            raise RuntimeError(f"the relay refused {what}")
        return json.loads(answer)  # type: ignore[no-any-return]


@functools.cache
def _kernel_has_netem() -> bool:
    return _refusal(Link(delay_us=1), is_bridged=True) == ""


def _is_bridged(link: Link, changing: bool) -> bool:
    if changing or link.truncate_percent or link.reorder_percent or link.retry_ms:
        return False
    return link.is_plain or _kernel_has_netem()


def _start_relay(count: int, link: Link, is_bridged: bool) -> tuple[subprocess.Popen[str], dict[str, object]]:
    asked = json.dumps({"count": count, "bridge": is_bridged, "link": asdict(link)})
    relay = subprocess.Popen(
        [sys.executable, "-m", "tests.hosts.relay", asked], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert relay.stdout is not None
    line = relay.stdout.readline()
    return relay, json.loads(line) if line else {"error": f"the relay ended with {relay.wait()}"}


def _end(relay: subprocess.Popen[str]) -> None:
    assert relay.stdin is not None and relay.stdout is not None
    relay.stdin.close()
    try:
        relay.wait(_ENDS_S)
    finally:
        relay.kill()
        relay.wait()
        relay.stdout.close()


def _refusal(link: Link, is_bridged: bool) -> str:
    relay, answer = _start_relay(1, link, is_bridged)
    _end(relay)
    return str(answer.get("error", ""))


def missing(link: Link = _PLAIN, changing: bool = False) -> str:
    """Why no hosts can be made here, or none with such a link between them; empty where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} not installed (iproute2, util-linux)"
    return _refusal(link, _is_bridged(link, changing))


@contextlib.contextmanager
def hosts(count: int, link: Link, changing: bool = False) -> Iterator[Network]:
    """`count` hosts, gone afterwards, with all that runs on them; also where this process is killed.

    `changing`: what the returned `Network` can do to links is wanted.
    """
    is_bridged = _is_bridged(link, changing)
    relay, answer = _start_relay(count, link, is_bridged)
    try:
        if "error" in answer:
            raise RuntimeError(f"no hosts: {answer['error']}")
        places = [f"/proc/{relay.pid}/fd/{descriptor}" for descriptor in answer["namespaces"]]  # type: ignore[attr-defined]
        made = tuple(Host(f"host{index}", address_of(index), place) for index, place in enumerate(places))
        yield Network(made, relay.pid, not is_bridged, float(answer["own_us"]))  # type: ignore[arg-type]
    finally:
        _end(relay)


def start(
    made: Sequence[Host],
    ranks_per_host: int,
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[str]]:
    """`python -m module arguments` as every rank, with the variables that torchrun sets; by rank."""
    world = len(made) * ranks_per_host
    processes = []
    for index, host in enumerate(made):
        for local in range(ranks_per_host):
            variables = {
                **os.environ, **host.environment(made[0]), "RANK": str(index * ranks_per_host + local),
                "WORLD_SIZE": str(world), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(ranks_per_host),
                "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {}),
            }  # fmt: skip
            words = host.command(sys.executable, "-m", module, *arguments)
            processes.append(
                subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
    return processes


def finish(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[tuple[int, str]]:
    """Exit status and output of each; those that do not end in time are killed (status -9)."""
    found = []
    try:
        for process in processes:
            try:
                out, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            found.append((process.returncode, out))
    finally:
        for process in processes:
            process.kill()
    return found


if __name__ == "__main__":
    from tests.hosts.truth import main

    sys.exit(main())
