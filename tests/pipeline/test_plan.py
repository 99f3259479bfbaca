"""Arena plans: bytes known ahead, no overlap of what is live together, one plan a group, channels by name."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tests.graphs import toys
from tests.graphs.nonempty import some
from tests.graphs.toys import Offer
from weaveopt.pipeline.plan import Planned, plan
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer, Lifetime, MemoryPlan, PlacedBuffer
from weaveopt.rule import BufferRequest, CapturedGraph, Chosen, Context, Exposure, Memory, Placement

HEADER_BYTES = 132 << 10
"""Header of the arena of a GPU group: csrc/fabric/arena.h."""


def memory(*buffers: Buffer, channel: str = "main") -> Memory:
    return Memory(tuple(BufferRequest(buffer) for buffer in buffers), channel)


def needing(graph: toys.Graph, *buffers: Buffer, fabric: Fabric = Fabric.SHM, group: str = "0") -> None:
    graph.site([Offer(1.0, fabric)], memory=memory(*buffers), group=group)


def planned(graph: toys.Graph, *groups: str) -> Planned:
    rule = toys.Toy()
    known = toys.context(groups=groups or ("0",))
    return plan(toys.chose(graph, rule, known), toys.rules(rule), known)


def only(found: Planned) -> MemoryPlan:
    (plan_of_group,) = found.plans
    return plan_of_group


def spans(buffers: Sequence[PlacedBuffer]) -> list[tuple[int, int]]:
    return sorted({(b.offset, b.offset + b.num_bytes) for b in buffers if b.num_bytes})


def shm_need(tokens: int) -> tuple[Buffer, Buffer]:
    return (
        Buffer("partial", 2 * tokens * 10, Lifetime.ARENA, alignment=4096),
        Buffer("output", tokens * 6, Lifetime.CALL, alignment=4096),
    )


def test_bytes_cover_the_largest_site_and_buffers_do_not_overlap() -> None:
    graph = toys.Graph()
    needing(graph, *shm_need(100))
    needing(graph, *shm_need(3000))
    found = planned(graph)
    arena = only(found)
    assert arena.num_bytes >= 2 * 3000 * 10 + 3000 * 6
    a, b = found.placements["s0"].buffers, found.placements["s1"].buffers
    assert a["partial"] == b["partial"], "one place for all sites"
    assert (a["partial"].num_bytes, a["partial"].owners) == (60000, ("s0", "s1"))
    assert (a["output"].num_bytes, b["output"].num_bytes) == (600, 18000)
    assert a["output"].offset == b["output"].offset, "the first call is over when the second begins"
    for site in (a, b):
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans(list(site.values()))))
    assert spans(arena.buffers)[-1][1] <= arena.num_bytes < spans(arena.buffers)[-1][1] + 4096


def test_a_site_without_memory_has_no_place_and_no_plan() -> None:
    graph = toys.Graph()
    graph.site([Offer(1.0)])
    found = planned(graph)
    assert (found.plans, found.placements) == ((), {})


def test_groups_have_arenas_of_their_own() -> None:
    graph = toys.Graph()
    needing(graph, *shm_need(10), group="1")
    needing(graph, *shm_need(20), group="0")
    found = planned(graph, "0", "1")
    assert [each.group for each in found.plans] == ["0", "1"]
    assert [each.of_site("s0") != {} for each in found.plans] == [False, True]
    assert [found.placements[site].buffers["partial"].num_bytes for site in ("s0", "s1")] == [200, 400]


def regions(mailboxes: int, staging: int, output: int, partial: int = 0) -> tuple[Buffer, ...]:
    sizes = {"mailboxes": mailboxes, "staging": staging, "output": output, "partial": partial}
    fills, of_calls = {"mailboxes": 0x80000000}, {"partial": Lifetime.CALL}
    return tuple(
        Buffer(name, size, of_calls.get(name, Lifetime.ARENA), fills.get(name)) for name, size in sizes.items() if size
    )


def test_sites_of_a_gpu_group_share_the_regions() -> None:
    graph = toys.Graph()
    needing(graph, *regions(2 * 25600, 51200, 102400), fabric=Fabric.PEER)
    needing(graph, *regions(2 * 10240, 81920, 40960), fabric=Fabric.PEER)
    found = only(planned(graph))
    assert found.fabric is Fabric.PEER
    sizes = {buffer.name: (buffer.num_bytes, buffer.fill) for buffer in found.buffers}
    assert sizes == {"mailboxes": (51200, 0x80000000), "output": (102400, None), "staging": (81920, None)}
    assert all(buffer.owners == ("s0", "s1") for buffer in found.buffers)
    assert [buffer.offset for buffer in found.buffers] == [0, 51200, 153600], "by name, one behind the other"
    assert found.num_bytes == HEADER_BYTES + 51200 + 102400 + 81920


def test_the_plan_counts_as_the_native_part_does() -> None:
    native = pytest.importorskip("weaveopt._native")
    assert native.HEADER_BYTES == HEADER_BYTES
    kernels, largest = native.GpuKernel.__members__.values(), {}
    graph = toys.Graph()
    for kernel in kernels:
        needs = native.gpu_buffers(kernel, 9, 64, native.DType.bfloat16, native.OutKind.same, 2)
        lifetimes = [Lifetime.ARENA if need.per_arena else Lifetime.CALL for need in needs]
        buffers = (Buffer(n.name, n.num_bytes, life, n.fill) for n, life in zip(needs, lifetimes, strict=True))
        needing(graph, *buffers, fabric=Fabric.PEER)
        largest.update({need.name: max(need.num_bytes, largest.get(need.name, 0)) for need in needs})
    found = only(planned(graph))
    assert {(buffer.name, buffer.num_bytes) for buffer in found.buffers} == set(largest.items())
    kept = sum(size for name, size in largest.items() if name != "partial")
    zone = -(-kept // 4096) * 4096
    assert len(kernels) == 5 and found.num_bytes == native.HEADER_BYTES + zone + largest["partial"]
    assert all(buffer.offset % native.GPU_ALIGNMENT == 0 for buffer in found.buffers)


def test_a_fabric_that_maps_more_stands_for_the_arena() -> None:
    """The buffer of a GEMM that writes into the arena is there for the site that asks for it."""
    graph = toys.Graph()
    needing(graph, *regions(0, 0, 30720, 256), fabric=Fabric.MULTIMEM)
    needing(graph, *regions(20480, 81920, 40960), fabric=Fabric.PEER)
    found = planned(graph)
    assert only(found).fabric is Fabric.MULTIMEM, "what maps it by multicast too"
    assert sorted(found.placements["s0"].buffers) == ["output", "partial"]
    assert sorted(found.placements["s1"].buffers) == ["mailboxes", "output", "staging"]


def test_channels_are_numbered_by_their_first_site() -> None:
    graph = toys.Graph()
    for channel in ("rows", "experts", "rows"):
        graph.site([Offer(1.0)], memory=memory(channel=channel))
    found = planned(graph)
    assert [(channel.name, channel.index) for channel in only(found).channels] == [("rows", 0), ("experts", 1)]
    assert [found.placements[f"s{index}"].channel for index in range(3)] == [0, 1, 0]


def test_a_buffer_that_is_read_later_keeps_its_bytes() -> None:
    """A buffer is kept until the site after its last reader has finished: that one may begin before the reader is."""
    graph = toys.Graph()
    first = graph.node()
    reader = graph.node()
    needing(graph, Buffer("call", 4096))
    last = graph.node()
    later = BufferRequest(Buffer("rows", 4096, Lifetime.UNTIL_READ), reader)
    graph.sites.insert(0, toys.Graph().site([Offer(1.0)], [first], name="made", memory=Memory((later,))))
    graph.site([Offer(1.0)], [last], name="behind", memory=memory(Buffer("call", 4096)))
    placements = planned(graph).placements
    rows, *calls = (
        placements[site].buffers[name] for site, name in (("made", "rows"), ("s0", "call"), ("behind", "call"))
    )
    assert (rows.first, rows.last) == (0, 1)
    assert calls[0].offset != rows.offset, "lives together with it"
    assert calls[1].offset == rows.offset


class Owning:
    """A graph rule whose own operators keep rows in the arena."""

    name = "owning"

    def variants(self, captured: CapturedGraph, exposure: Exposure, context: Context) -> tuple[CapturedGraph, ...]:
        return ()

    def graph_memory(self, variant: CapturedGraph, context: Context) -> dict[str, tuple[Fabric, Memory]]:
        return {"0": (Fabric.SHM, memory(Buffer("own", 4096), channel="own"))}

    def settle_graph(
        self, variant: CapturedGraph, chosen: Sequence[Chosen], placements: Mapping[str, Placement], context: Context
    ) -> None: ...


def test_memory_of_a_variant_is_in_use_as_long_as_its_graph_runs() -> None:
    graph = toys.Graph()
    for _ in range(3):
        needing(graph, Buffer("call", 4096))
    known = toys.context()
    decided = toys.chose(graph, toys.Toy(), known)
    captured = replace(decided.priced.captured, variant="halves", rule="owning")
    rules = replace(toys.rules(toys.Toy()), graph_rules=(Owning(),))
    found = plan(replace(decided, priced=replace(decided.priced, captured=captured)), rules, known)
    own = found.of_variant(captured)["0"]
    assert (own.buffers["own"].first, own.buffers["own"].last, own.channel) == (0, 3, 1)
    calls = [found.placements[f"s{index}"].buffers["call"] for index in range(3)]
    assert len({each.offset for each in calls}) == 1 and calls[0].offset != own.buffers["own"].offset
    assert plan(decided, rules, known).of_variant(decided.priced.captured) == {}, "the captured graph has no such rule"


def test_who_reads_a_buffer_last_has_to_be_told() -> None:
    graph = toys.Graph()
    needing(graph, Buffer("rows", 4096, Lifetime.UNTIL_READ))
    with pytest.raises(AssertionError, match="who reads rows last"):
        planned(graph)


@pytest.mark.parametrize("seed", range(30))
def test_live_buffers_never_overlap(seed: int) -> None:
    """Sites with buffers of calls, of the arena, and some that nodes further down read."""
    rng = random.Random(seed)
    graph = toys.Graph()
    nodes = [graph.node() for _ in range(30)]
    starts = sorted(rng.sample(range(20), rng.randint(1, 12)))
    read_at: dict[tuple[str, str], int] = {}
    for index, start in enumerate(starts):
        requests = []
        for number in range(rng.randint(1, 3)):
            name, num_bytes = f"b{number}", rng.randint(0, 30000)
            lifetime = rng.choice((Lifetime.CALL, Lifetime.UNTIL_READ))
            read_at[f"s{index}", name] = start if lifetime is Lifetime.CALL else rng.randint(start, 29)
            reader = nodes[read_at[f"s{index}", name]] if lifetime is Lifetime.UNTIL_READ else None
            requests.append(BufferRequest(Buffer(name, num_bytes, lifetime), reader))
        requests.append(BufferRequest(Buffer("kept", rng.randint(1, 9000), Lifetime.ARENA)))
        graph.site([Offer(1.0)], [nodes[start]], memory=Memory(tuple(requests)))
    arena = only(planned(graph))
    for a, b in itertools.combinations(arena.buffers, 2):
        apart = a.offset + a.num_bytes <= b.offset or b.offset + b.num_bytes <= a.offset
        assert apart or not (a.num_bytes and b.num_bytes) or (a.first > b.last or b.first > a.last)
        assert Lifetime.ARENA not in (a.lifetime, b.lifetime) or apart
    for buffer in some(arena.buffers):
        if buffer.lifetime is Lifetime.UNTIL_READ:
            begun = [at for at, start in enumerate(starts) if start <= read_at[buffer.owners[0], buffer.name]]
            assert buffer.last >= max(begun), "every site that begins before its last reader finds it alive"
        assert buffer.offset + buffer.num_bytes <= arena.num_bytes
