"""A wait for peers ends where one of them has ended, as far as a refused connection shows it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import cast

import pytest
import torch.distributed as dist

from weaveopt.fabrics.positions import Address
from weaveopt.fabrics.rounds import Closed, Rounds, Why

OWN_HOST, OTHER_HOST = "127.0.0.1", "127.0.0.2"
"""Both reach this host, whose address for its peers is the first."""


class CountingGroup:
    def _get_sequence_number_for_group(self) -> int:
        return 3


class Peer:
    """A rank's address in the store; it answers with `answer`, or never, until it ends."""

    def __init__(self, store: dist.Store, host: str) -> None:
        self.socket = socket.create_server((host, 0))
        store.set("address/1", json.dumps(asdict(Address(host, self.socket.getsockname()[1], "token"))))

    def answer(self) -> None:
        connection, _ = self.socket.accept()
        connection.recv(64)
        connection.sendall(json.dumps({"calls": 0, "collectives": 3}).encode())
        connection.close()

    def end(self) -> None:
        self.socket.close()


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def group() -> Iterator[CountingGroup]:
    yield CountingGroup()


def rounds_in(store: dist.Store, group: CountingGroup) -> Rounds:
    return Rounds("tp", (4, 5), 0, cast(dist.ProcessGroup, group), store, OWN_HOST)


def collected(rounds: Rounds, timeout_s: float) -> tuple[Closed, float]:
    number = rounds.publish("document", "graph", timeout_s)
    assert isinstance(number, int)
    began = time.monotonic()
    found = rounds.collect(number, "graph", "", timeout_s)
    assert isinstance(found, Closed)
    return found, time.monotonic() - began


def test_a_peer_that_has_ended_is_not_waited_for(store: dist.Store, group: CountingGroup) -> None:
    rounds = rounds_in(store, group)
    Peer(store, OWN_HOST).end()
    found, took_s = collected(rounds, 60.0)
    assert (found.why, found.peers, found.rank) == (Why.ENDED, (5,), 4) and took_s < 5.0
    # The others hear the same.
    number = rounds_in(store, group).publish("document", "graph", 5.0)
    assert number == found


def test_a_peer_that_does_not_answer_has_not_ended(store: dist.Store, group: CountingGroup) -> None:
    peer = Peer(store, OWN_HOST)
    found, took_s = collected(rounds_in(store, group), 4.0)
    peer.end()
    assert found.why is Why.LATE and took_s >= 4.0


@pytest.mark.parametrize("reached", [False, True])
def test_between_hosts_a_refused_connection_says_nothing_of_a_rank_that_was_never_reached(
    reached: bool, store: dist.Store, group: CountingGroup
) -> None:
    rounds, peer = rounds_in(store, group), Peer(store, OTHER_HOST)
    rounds._read_peers()
    if reached:
        answering = threading.Thread(target=peer.answer)
        answering.start()
        assert rounds._ask([1]) == (None, [])
        answering.join()
    peer.end()
    found, _ = collected(rounds, 3.0)
    assert found.why is (Why.ENDED if reached else Why.LATE)


def test_whoever_may_have_the_store_stays_until_all_that_came_know_of_a_closed_round(
    store: dist.Store, group: CountingGroup
) -> None:
    """Rank 2 never comes, and is not waited for."""
    first, second = (Rounds("tp", (0, 1, 2), at, cast(dist.ProcessGroup, group), store, OWN_HOST) for at in (0, 1))
    assert [each.publish("document", "graph", 5.0) for each in (second, first)] == [0, 0]
    closed = first.collect(0, "graph", "", 0.5)
    assert isinstance(closed, Closed) and closed.why is Why.LATE and closed.peers == (2,)
    reading = threading.Timer(0.5, lambda: second.collect(0, "graph", "", 5.0))
    reading.start()
    began = time.monotonic()
    first.settle(0)
    assert 0.4 < time.monotonic() - began < 3.0
    reading.join()
