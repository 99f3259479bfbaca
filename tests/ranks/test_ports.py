"""Ports that groups of ranks get belong to nobody else."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.ranks import ports


def test_outside_of_the_ephemeral_range() -> None:
    assert ports.chosen_from("32768\t60999\n") == (10_000, 32_768)
    assert ports.chosen_from("15000 64999") == (10_000, 15_000)
    assert ports.chosen_from("1024 65535") == (1_024, 65_536), "no room below: any"


def test_no_port_twice() -> None:
    chosen = [ports.free_port() for _ in range(60)]
    assert len(set(chosen)) == len(chosen)
    low, high = ports.chosen_from(ports.EPHEMERAL.read_text())
    assert all(low <= port < high for port in chosen), chosen
    code = f"from tests.ranks.ports import reserve; print(*(reserve(port) for port in {chosen[-5:]}))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["False"] * 5


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not ports.reserve(listener.getsockname()[1])
