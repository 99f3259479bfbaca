"""Hosts on one machine: network namespaces on a bridge, with the delay, rate and loss of a real link between them.

A namespace has an address of its own and shares nothing of the network with the others; file system, process numbers
and memory are the machine's, so ranks say which host they are on (`WEAVE_HOST`). Needs root, `ip` and `tc`; `missing()`
says what is not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PORT = 29400


@dataclass(frozen=True)
class Link:
    """From one host to the bridge; a packet between two hosts passes one of each."""

    delay_us: float = 0.0
    """One way, between two hosts."""
    gbit_per_s: float = 0.0
    """0: as fast as the machine is."""
    loss_percent: float = 0.0

    @property
    def discipline(self) -> list[str]:
        """As `tc` takes it: `netem` where packets are late or lost, which not every kernel has, else a token bucket."""
        rate = ["rate", f"{self.gbit_per_s:g}gbit"] if self.gbit_per_s else []
        if self.delay_us or self.loss_percent:
            loss = ["loss", f"{self.loss_percent:g}%"] if self.loss_percent else []
            return ["netem", "limit", "100000", "delay", f"{self.delay_us:g}us", *loss, *rate]
        return ["tbf", *rate, "burst", "1mb", "latency", "100ms"] if rate else []


@dataclass(frozen=True)
class Host:
    name: str
    """Of its namespace."""
    address: str
    port_name: str
    """Its end of the link at the bridge."""
    interface: str
    """The other end, on the host."""

    def command(self, *words: str) -> list[str]:
        """`words`, run on the host."""
        return ["ip", "netns", "exec", self.name, *words]


def missing(link: Link = Link()) -> str:
    """Why no hosts can be made here, or none with such a link between them; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} not installed (iproute2)"
    name = f"weave{uuid.uuid4().hex[:6]}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespace may be made: {tried.stderr.strip()}"
    words = Host(name, "", "", "lo").command("tc", "qdisc", "add", "dev", "lo", "root", *link.discipline)
    refused = link.discipline and subprocess.run(words, capture_output=True, check=False).returncode
    subprocess.run(["ip", "netns", "del", name], check=False)
    return f"this kernel has no {link.discipline[0]} (tc qdisc)" if refused else ""


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def hosts(count: int, link: Link) -> Iterator[list[Host]]:
    """`count` hosts, gone afterwards."""
    tag = uuid.uuid4().hex[:5]
    bridge, subnet = f"wb{tag}", f"10.{77 + int(tag[:2], 16) % 100}.{int(tag[2:4], 16)}"
    made = [
        Host(f"wn{tag}{index}", f"{subnet}.{index + 1}", f"wp{tag}{index}", f"wi{tag}{index}") for index in range(count)
    ]
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for host in made:
            inner = host.interface
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", host.port_name, "type", "veth", "peer", "name", inner)
            _run("ip", "link", "set", inner, "netns", host.name)
            _run("ip", "link", "set", host.port_name, "master", bridge, "up")
            _run(*host.command("ip", "addr", "add", f"{host.address}/24", "dev", inner))
            _run(*host.command("ip", "link", "set", inner, "up"))
            _run(*host.command("ip", "link", "set", "lo", "up"))
            if link.discipline:
                _run(*host.command("tc", "qdisc", "add", "dev", inner, "root", *link.discipline))
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", host.port_name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def start(
    made: Sequence[Host], ranks_per_host: int, module: str, *arguments: str, environment: dict[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """`python -m module arguments` as every rank, with the variables that torchrun sets; by rank."""
    world = len(made) * ranks_per_host
    processes = []
    for index, host in enumerate(made):
        for local in range(ranks_per_host):
            variables = {
                **os.environ, "MASTER_ADDR": made[0].address, "MASTER_PORT": str(PORT),
                "RANK": str(index * ranks_per_host + local), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(ranks_per_host), "WEAVE_HOST": host.name, "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": host.interface, **(environment or {}),
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
