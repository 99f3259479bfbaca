"""How GPU arenas grow, and which of those that were outgrown are given back; torch's GPU calls are made up."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from tests.fabrics.test_arena_gpu import make_up_gpus, plan_of, reserve, sizes
from tests.ranks import run_ranks
from weaveopt.fabrics import peer
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.peer import PeerArena


def run_prefills(rank: int) -> None:
    """Static graphs of 1K, 2K, ... 8K tokens: how often an arena is replaced, and what is kept."""
    make_up_gpus(rank)
    row_bytes = 1024
    for is_captured in (False, True):
        group = dist.new_group([0, 1]).group_name
        made: list[PeerArena] = []
        for tokens in range(1024, 8193, 1024):
            need = plan_of(mailboxes=4096, staging=tokens * row_bytes, output=tokens * row_bytes)
            memory = reserve(need, group)
            if memory not in made:
                made.append(memory)
            torch.cuda.is_current_stream_capturing = lambda is_captured=is_captured: is_captured
            memory.begin_call()
            torch.cuda.is_current_stream_capturing = lambda: False
        assert [sizes(each)["staging"] // row_bytes for each in made] == [1024, 2048, 4096, 8192]
        alive = [each for each in made if not each.closed]
        assert alive == (made if is_captured else made[-1:])
        assert sum(each.num_bytes for each in alive[:-1]) < made[-1].num_bytes
        peer.release(group)
        assert all(each.closed for each in made)

    # Twice as much is not there on one rank: all get what they need and no more.
    reserve(plan_of(output=1 << 20))
    make_up_gpus(rank, free_bytes=3 << 20 if rank == 1 else 1 << 40)
    assert sizes(reserve(plan_of(output=9 << 18))) == {"output": 9 << 18}


def test_outgrown_arenas_are_given_back_unless_captured_graphs_hold_them() -> None:
    run_ranks(run_prefills, 2)


def test_what_was_outgrown_doubles_and_a_floor_is_for_all_buffers() -> None:
    layout = Layout.of(plan_of(transient_bytes=4096, mailboxes=1024, output=65536))
    grown = layout.grown(Layout.of(plan_of(mailboxes=512, output=65537)))
    assert {b.name: b.num_bytes for b in grown.buffers} == {"mailboxes": 1024, "output": 131072}
    assert grown.transient_bytes == 4096 and grown.holds(layout)
    assert layout.grown(Layout.of(plan_of(output=1 << 20))).buffer("output").num_bytes == 1 << 20
    assert layout.grown(Layout.of(plan_of(transient_bytes=4097))).transient_bytes == 8192
    assert layout.grown(Layout.of(plan_of(staging=512))).buffer("staging").num_bytes == 512

    floor = 1 << 24
    for need in (layout, Layout.of(plan_of(transient_bytes=4096)), Layout.of(plan_of(output=512))):
        roomy = replace(need, floor_bytes=floor).filled()
        assert roomy.num_bytes == floor and roomy.num_bytes_asked > 0.95 * floor and roomy.holds(need)
        assert all(buffer.num_bytes % 8192 == 0 for buffer in roomy.buffers), "halves on pages of their own"
    assert replace(layout, floor_bytes=1).filled() == replace(layout, floor_bytes=1)
    assert Layout(floor_bytes=floor).filled() == Layout(floor_bytes=floor), "no buffer to make larger"
