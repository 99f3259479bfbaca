"""Named buffers in an arena: what is live together never overlaps, ARENA buffers have one place, nothing is random."""

from __future__ import annotations

import random

import pytest

from weaveopt.errors import WeaveError
from weaveopt.records.memory import Buffer, Lifetime, PlacedBuffer
from weaveopt.solver.placement import (
    ZONE_ALIGNMENT,
    PlacementRequest,
    aligned,
    arena_bytes,
    place,
    place_kept,
    transient_begin,
    unite,
)

KEPT = Lifetime.ARENA


def random_requests(seed: int) -> list[PlacementRequest]:
    numbers = random.Random(seed)
    requests: list[PlacementRequest] = []
    for index in range(numbers.randint(1, 25)):
        first = numbers.randint(0, 8)
        lifetime = numbers.choice(list(Lifetime))
        name = numbers.choice("abc") if lifetime is KEPT else f"output{index}"
        fill = 7 if name == "a" and lifetime is KEPT else None
        buffer = Buffer(name, numbers.randint(0, 30000), lifetime, fill, numbers.choice((1, 64, 256, 4096)))
        requests.append(PlacementRequest(f"site{numbers.randint(0, 9)}", buffer, first, first + numbers.randint(0, 4)))
    return requests


def together(a: PlacedBuffer, b: PlacedBuffer) -> bool:
    return KEPT in (a.lifetime, b.lifetime) or (a.first <= b.last and b.first <= a.last)


@pytest.mark.parametrize("seed", range(60))
def test_what_is_live_together_never_overlaps(seed: int) -> None:
    requests, start = random_requests(seed), 4096 * (seed % 3)
    placed = place(requests, start)
    begin = transient_begin(placed, start)
    for index, a in enumerate(placed):
        assert a.offset >= start and a.offset % a.alignment == 0 and a.offset_in_zone == a.offset - a.zone_begin
        assert (a.zone_begin == 0) if a.lifetime is KEPT else (a.offset >= begin == a.zone_begin)
        for b in placed[index + 1 :]:
            apart = a.offset + a.num_bytes <= b.offset or b.offset + b.num_bytes <= a.offset
            assert apart or not together(a, b) or not a.num_bytes or not b.num_bytes, f"{a} overlaps {b}"
    for owner, buffer, first, last in requests:
        (found,) = (p for p in placed if p.name == buffer.name and (owner in p.owners))
        assert found.num_bytes >= buffer.num_bytes and found.first <= first and last <= found.last
        assert found.fill == buffer.fill and found.offset % buffer.alignment == 0
    assert place(requests, start) == placed


@pytest.mark.parametrize("seed", range(30))
def test_kept_buffers_are_a_function_of_their_union(seed: int) -> None:
    """In whatever order graphs come, and however their requests are spread over them."""
    requests = [request for request in random_requests(seed) if request.buffer.lifetime is KEPT]
    half = len(requests) // 2
    one, other = place(requests[:half]), place(requests[half:])
    where = [(b.name, b.offset, b.num_bytes) for b in place(requests)]
    for both in (unite(one, other), unite(other, one)):
        assert [(b.name, b.offset, b.num_bytes) for b in place_kept(both)] == where


@pytest.mark.parametrize("seed", range(30))
def test_the_transient_zone_is_no_larger_than_without_sharing(seed: int) -> None:
    requests = [request for request in random_requests(seed) if request.buffer.lifetime is not KEPT]
    placed = place(requests)
    apart = sum(aligned(buffer.num_bytes, ZONE_ALIGNMENT) for _, buffer, _, _ in requests)
    at_once = max(
        (sum(p.num_bytes for p in placed if p.first <= step <= p.last) for step in range(16)),
        default=0,
    )
    assert at_once <= arena_bytes(placed) <= apart


def test_calls_that_follow_one_another_share_their_bytes() -> None:
    placed = place(
        [PlacementRequest(f"s{i}", Buffer("output", size), i, i) for i, size in enumerate((1000, 5000, 300))]
    )
    assert [p.offset for p in placed] == [0, 0, 0] and arena_bytes(placed) == 5120


def test_a_buffer_goes_into_the_smallest_gap_that_holds_it() -> None:
    def buffer(name: str, size: int) -> Buffer:
        return Buffer(name, size, Lifetime.UNTIL_READ, alignment=1)

    requests = [
        PlacementRequest("a", buffer("long", 1000), 0, 9),
        PlacementRequest("b", buffer("gap of 900", 900), 0, 0),
        PlacementRequest("c", buffer("wall", 800), 0, 9),
        PlacementRequest("d", buffer("gap of 700", 700), 0, 0),
        PlacementRequest("e", buffer("roof", 600), 0, 9),
        PlacementRequest("f", buffer("fits both", 500), 1, 1),
    ]
    offsets = {p.name: p.offset for p in place(requests)}
    assert offsets["fits both"] == offsets["gap of 700"] == 2700


def test_kept_buffers_come_first_in_the_order_of_their_names() -> None:
    requests = [
        PlacementRequest("s0", Buffer("staging", 100, KEPT), 0, 0),
        PlacementRequest("s0", Buffer("output", 5000), 0, 0),
        PlacementRequest("s1", Buffer("mailboxes", 600, KEPT, fill=0x80000000), 1, 1),
        PlacementRequest("s1", Buffer("staging", 300, KEPT), 1, 1),
    ]
    mailboxes, staging, output = place(requests)
    assert (mailboxes.name, mailboxes.offset, mailboxes.fill, mailboxes.owners) == ("mailboxes", 0, 0x80000000, ("s1",))
    assert (staging.name, staging.offset, staging.num_bytes, staging.owners) == ("staging", 768, 300, ("s0", "s1"))
    assert (output.offset, output.zone_begin, output.offset_in_zone) == (4096, 4096, 0)
    assert arena_bytes((mailboxes, staging)) == 1280


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (
            [
                PlacementRequest("s", Buffer("b", 1, KEPT, 1), 0, 0),
                PlacementRequest("t", Buffer("b", 1, KEPT, 2), 0, 0),
            ],
            "s wants it filled with 1, t",
        ),
        ([PlacementRequest("s", Buffer("b", 1, fill=1), 0, 0)], "only what lives as long as the arena"),
        ([PlacementRequest("s", Buffer("b", -1), 0, 0)], "-1 bytes"),
        ([PlacementRequest("s", Buffer("b", 1, alignment=8192), 0, 0)], "aligned to 8192"),
        ([PlacementRequest("s", Buffer("b", 1), 3, 2)], "from 3 to 2"),
    ],
)
def test_what_cannot_be_placed_is_refused(requests: list[PlacementRequest], message: str) -> None:
    with pytest.raises(WeaveError, match=message):
        place(requests)
