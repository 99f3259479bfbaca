"""The process that has emulated hosts: their network namespaces, their devices, and the links between them.

    python -m tests.hosts.relay '{"count": 2, "bridge": false, "link": {"delay_us": 50}}'

Namespaces have no names: they are open files of this process, so they end with it, and their devices with them. It ends
when its standard input does, or its parent, and kills first what still runs on a host. It says one line when hosts are
there. A relayed host has a TUN device, whose packets this process reads and writes to the target's when their time has
come; bridged ones have veth pairs and leave delay and rate to the kernel.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from tests.hosts.link import Link, Wires

CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
INTERFACE = "eth0"
NETWORK = "10.77.0"
"""Nothing else is in these namespaces, so it may be the same for all hosts that were ever made."""
_CALIBRATION_PORT, _CALIBRATION_TURNS, _CALIBRATION_ROUNDS, _CALIBRATION_S = 29300, 3, 80, 2.0
_AWAKE_S = 60e-6
_BURST, _SMALL_BYTES = 16, 1500
"""Packets read of one host before the others have their turn. After a small one there is seldom another."""

_libc = ctypes.CDLL(None, use_errno=True)


def address_of(index: int) -> str:
    return f"{NETWORK}.{index + 1}"


def control_name(relay_pid: int) -> str:
    """Name of the control socket, an abstract one in each namespace and none in the file system."""
    return f"\0weave-hosts-{relay_pid}"


def _checked(what: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter(namespace: int) -> None:
    """Moves the calling thread into the network namespace of that descriptor."""
    _checked("setns", _libc.setns(namespace, CLONE_NEWNET))


def _new_namespace() -> int:
    """This thread's from now on; its descriptor."""
    _checked("unshare", _libc.unshare(CLONE_NEWNET))
    found = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    _run("ip", "link", "set", "lo", "up")
    return found


def _run(*words: str) -> None:
    """In the namespace that the thread is in."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


SLOW_GBIT_PER_S = 4.0
"""Slower links have a small token bucket: a packet wakes the kernel's timer, which fast ones cannot afford."""


def discipline(link: Link) -> list[str]:
    """How the kernel makes such a link, as `tc` takes it: `netem`, which not every kernel has, or a token bucket."""
    rate = ["rate", f"{link.gbit_per_s:g}gbit"] if link.gbit_per_s else []
    if link.is_plain:
        # What a bucket holds passes at once, which on a slow link would be most of a message.
        burst = "1mb" if link.gbit_per_s >= SLOW_GBIT_PER_S else "4kb"
        return ["tbf", *rate, "burst", burst, "latency", "100ms"] if rate else []
    loss = ["loss", f"{link.loss_percent:g}%"] if link.loss_percent else []
    double = ["duplicate", f"{link.duplicate_percent:g}%"] if link.duplicate_percent else []
    return ["netem", "limit", "100000", "delay", f"{link.delay_us:g}us", *loss, *double, *rate]


class Hosts:
    """Namespaces, and what is in them. The thread is in a namespace of its own: that of the bridge."""

    def __init__(self, count: int, link: Link, is_bridged: bool) -> None:
        self.outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.namespaces = [_new_namespace() for _ in range(count)]
        self.tunnels: list[int] = []
        self.controls = [self._control(namespace) for namespace in (*self.namespaces, self.outside)]
        _new_namespace()
        if is_bridged:
            self._bridge(link)
        else:
            for index, namespace in enumerate(self.namespaces):
                enter(namespace)
                self.tunnels.append(self._tunnel(index, link))

    @staticmethod
    def _control(namespace: int) -> socket.socket:
        enter(namespace)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(control_name(os.getpid()))
        listener.listen(16)
        return listener

    def _bridge(self, link: Link) -> None:
        _run("ip", "link", "add", "bridge", "type", "bridge")
        _run("ip", "link", "set", "bridge", "up")
        hub = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        for index, namespace in enumerate(self.namespaces):
            port, place = f"port{index}", f"/proc/{os.getpid()}/fd/{namespace}"
            enter(hub)
            _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", place)
            _run("ip", "link", "set", port, "master", "bridge", "up")
            enter(namespace)
            _run("ip", "addr", "add", f"{address_of(index)}/24", "dev", INTERFACE)
            _run("ip", "link", "set", INTERFACE, "up")
            if discipline(link):
                _run("tc", "qdisc", "add", "dev", INTERFACE, "root", *discipline(link))

    @staticmethod
    def _tunnel(index: int, link: Link) -> int:
        tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
        _run("ip", "link", "set", INTERFACE, "mtu", str(link.mtu), "txqueuelen", "4000", "up")
        _run("ip", "addr", "add", f"{address_of(index)}/24", "dev", INTERFACE)
        if link.retry_ms:
            _run("ip", "route", "replace", f"{NETWORK}.0/24", "dev", INTERFACE, "rto_min", f"{link.retry_ms}ms")
        return tunnel

    def kill(self, indices: Iterable[int]) -> int:
        """SIGKILL to whatever runs on these hosts, at once; how many they were."""
        wanted = {os.fstat(self.namespaces[index]).st_ino for index in indices}
        killed: set[int] = set()
        empty = 0
        while True:
            found = {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _namespace_of(pid) in wanted}
            found -= {os.getpid(), *killed}
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # Nobody was forked meanwhile; twice, as a process that is becoming another program may show no namespace.
            empty = 0 if found else empty + 1
            if empty == 2:
                return len(killed)
            killed |= found


def _namespace_of(pid: int) -> int:
    """Its inode; 0 of a process that has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


def hurry() -> None:
    """Real-time priority for this process, where the system gives it: nothing that merely computes keeps it waiting."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def _forked(part: Callable[[float], None], hosts: Hosts, delay_us: float) -> int:
    """A child that does its part on a host of its own."""
    child = os.fork()
    if child:
        return child
    try:
        hurry()
        enter(hosts.namespaces[0 if part is _pings else 1])
        part(delay_us)
    finally:
        os._exit(0)


def _echoes(_: float) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.bind((address_of(1), _CALIBRATION_PORT))
        while True:
            end.sendto(*end.recvfrom(64))


def _pings(delay_us: float) -> None:
    """Sends the relay a packet's one-way time beyond the delay; then again, with the first value subtracted."""
    own_us = 0.0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.settimeout(0.05)
        for turn in range(_CALIBRATION_TURNS):
            times = []
            for _ in range(_CALIBRATION_ROUNDS):
                begin = time.perf_counter()
                with suppress(OSError):  # lost, or nobody is there yet
                    end.sendto(b"x", (address_of(1), _CALIBRATION_PORT))
                    end.recvfrom(64)
                    times.append((time.perf_counter() - begin) * 1e6)
            if times and own_us < delay_us:
                own_us = max(own_us + statistics.median(times) / 2 - delay_us, 0.0)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
                control.connect(control_name(os.getppid()))
                last = turn == _CALIBRATION_TURNS - 1
                control.sendall(json.dumps({"own_us": own_us, "is_calibrated": float(last)}).encode())
                control.recv(4096)


class Relay:
    """Forwards packets and serves its control socket until its standard input ends."""

    def __init__(self, hosts: Hosts, link: Link) -> None:
        self.hosts, self.wires = hosts, Wires(len(hosts.namespaces), link)
        self._source_of = {tunnel: index for index, tunnel in enumerate(hosts.tunnels)}
        self._controls = {each.fileno(): each for each in hosts.controls}
        self._is_calibrated = False
        self._news = [0, *self._controls, *hosts.tunnels]

    def run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Waits for the next thing to do, and does it. False when standard input has ended."""
        wires, now = self.wires, time.monotonic
        next_at = wires.next_at()
        left_s = None if next_at is None else max(next_at - now(), 0)
        # A timer's interrupt takes as long as many a delay: the last bit of it is waited for awake, if it is for a
        # single packet. Of several the link's rate tells when they arrive, and this process must not hold a core.
        if left_s is not None and len(wires) == 1:
            left_s = max(left_s - _AWAKE_S, 0)
        ready, _, _ = select.select(self._news, [], [], left_s)
        for each in ready:
            if each in self._source_of:
                self._take(each)
            elif each in self._controls:
                self._listen(self._controls[each])
            elif not os.read(each, 4096):
                return False
        for target, packet in wires.due(now()):
            with suppress(OSError):  # a device that is down loses packets
                os.write(self.hosts.tunnels[target], packet)
        return True

    def calibrate(self) -> None:
        """Takes what this process needs itself off the delay, as far as that goes: packets are late by what was asked.

        Measured by datagrams between the first two hosts, whose median counts; both ends are as urgent as the relay, so
        that a machine with other things to do is not taken for a slow relay.
        """
        children = [_forked(part, self.hosts, self.wires.link.delay_us) for part in (_echoes, _pings)]
        until = time.monotonic() + _CALIBRATION_S
        while not self._is_calibrated and time.monotonic() < until and self._turn():
            pass
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def _take(self, tunnel: int) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(tunnel, 65536)
            except BlockingIOError:
                return
            target = packet[19] - 1
            if packet[0] >> 4 == 4 and packet[16:19] == b"\x0a\x4d\x00" and 0 <= target < self.wires.count:
                self.wires.carry(packet, self._source_of[tunnel], target, time.monotonic())
            if len(packet) < _SMALL_BYTES:
                return

    def _listen(self, listener: socket.socket) -> None:
        """One change, and what was counted so far as the answer."""
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(1.0)
            with suppress(OSError, ValueError):
                asked = json.loads(connection.recv(4096))
                killed = self._change(asked)
                connection.sendall(json.dumps({**self.wires.counts.to_record(), "killed": killed}).encode())

    def _change(self, asked: dict[str, float]) -> int:
        wires = self.wires
        for what, value in asked.items():
            if what == "down":
                wires.down.add(int(value))
            elif what == "up":
                wires.down.discard(int(value))
            elif what == "loss_percent":
                wires.loss_percent = value
            elif what == "truncate":
                wires.to_truncate += int(value)
            elif what == "duplicate":
                wires.to_duplicate += int(value)
            elif what == "own_us":
                wires.own_us = value
            elif what == "is_calibrated":
                self._is_calibrated = bool(value)
            elif what == "kill":
                return self.hosts.kill([int(value)])
            else:
                raise ValueError(what)
        return 0


def main() -> None:
    asked = json.loads(sys.argv[1])
    link = Link(**asked["link"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked for the hosts ends them
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    try:
        hosts = Hosts(asked["count"], link, asked["bridge"])
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    try:
        # Packets are late by no more than it takes to wake up: as urgent as an interrupt, and with timers to the point.
        _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        hurry()
        gc.disable()
        relay = Relay(hosts, link)
        if hosts.tunnels and len(hosts.tunnels) > 1 and link.delay_us:
            relay.calibrate()
        print(json.dumps({"namespaces": hosts.namespaces, "own_us": relay.wires.own_us}), flush=True)
        relay.run()
    finally:
        hosts.kill(range(len(hosts.namespaces)))


if __name__ == "__main__":
    main()
