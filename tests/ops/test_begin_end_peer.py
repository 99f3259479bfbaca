"""Begun calls on GPUs as far as that needs none: streams, events, buffers, and what is kept until the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from tests.ops.test_all_reduce_norm_peer import HIDDEN, TABLE, Launches, MadeUpArena, make_call
from tests.ops.test_all_reduce_norm_peer import launches as launches
from weaveopt import _native
from weaveopt.errors import WeaveError
from weaveopt.fabrics import peer as transport
from weaveopt.fabrics.layout import Layout
from weaveopt.ops.reduction import peer_flight
from weaveopt.ops.reduction.buffers import MAILBOXES, buffer_name, communication_channel, locate, memory_plan
from weaveopt.ops.reduction.call import ReductionCall, decode
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.peer_flight import PeerStarter
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Lifetime

CURRENT, SIDE = 77, 99
"""Raw streams."""


@dataclass
class Steps:
    """Stands for the two streams: what was asked of them, in order."""

    seen: list[tuple[str, int]] = field(default_factory=list)
    code: int = 0

    def crossing(self, stream: object) -> SimpleNamespace:
        def step(name: str, on: int) -> int:
            self.seen.append((name, on))
            return self.code

        return SimpleNamespace(
            fork=lambda current: step("fork", current),
            launched=lambda: step("launched", SIDE),
            join=lambda current: step("join", current),
        )


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> Iterator[Steps]:
    made = Steps()
    monkeypatch.setattr(peer_flight, "_native", SimpleNamespace(StreamCrossing=made.crossing))
    monkeypatch.setattr(peer_flight, "communication_stream", lambda *_: SimpleNamespace(handle=SIDE, device=0))
    run = launches.run

    def recorded(*values: object) -> int:
        made.seen.append(("run", int(values[3])))  # type: ignore[call-overload]
        return run(*values)

    monkeypatch.setattr(launches, "run", recorded)
    yield made


def begun(**changes: object) -> ReductionCall:
    return make_call(begun=True, channel=communication_channel(), **changes)


def bind(call: ReductionCall, monkeypatch: pytest.MonkeyPatch) -> PeerStarter:
    made = MadeUpArena(layout=Layout.of(memory_plan("tp", [call])))
    monkeypatch.setattr(transport, "of", lambda name: made)
    return PeerStarter.bind(call, call.encode(), "all_reduce_norm_begin", lambda: None)


def rows(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)


def test_kernels_run_between_fork_and_join(launches: Launches, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = bind(begun(), monkeypatch)
    flight = starter.start(rows(4), EpilogueOperands(residual=rows(4)))
    assert flight is not None
    assert steps.seen == [("fork", CURRENT), ("run", SIDE), ("launched", SIDE)]
    assert [result.shape[0] for result in flight.results] == [4, 4, 0]
    assert launches.last.normalized == flight.results[0].data_ptr()
    flight.end()
    assert steps.seen[3:] == [("join", CURRENT)]
    assert launches.sites[-1].channel == communication_channel()


def test_no_tokens_launch_nothing(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    flight = bind(begun(), monkeypatch).start(rows(0), EpilogueOperands())
    assert flight is not None and ("run", SIDE) not in steps.seen


def test_the_library_runs_after_all_calls_in_flight(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bind(begun(), monkeypatch).start(rows(TABLE[-1].max_tokens + 1), EpilogueOperands()) is None
    assert steps.seen == [("fork", CURRENT), ("launched", SIDE), ("join", CURRENT)]


def test_a_launch_that_fails_returns_to_the_current_stream(
    launches: Launches, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = bind(begun(), monkeypatch)
    launches.code = 3
    with pytest.raises(WeaveError, match="error 3"):
        starter.start(rows(4), EpilogueOperands())
    assert [name for name, _ in steps.seen] == ["fork", "run", "launched", "join"]


def test_a_stream_that_fails_is_an_error(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = bind(begun(), monkeypatch)
    steps.code = 9
    with pytest.raises(WeaveError, match="error 9"):
        starter.start(rows(4), EpilogueOperands())


def test_the_flight_keeps_what_kernels_read(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of operands in another layout too: the allocator knows the current stream alone."""
    starter = bind(begun(), monkeypatch)
    copies: list[weakref.ref[torch.Tensor]] = []
    prepare = starter._site.prepare

    def watched(partial: torch.Tensor, *rest: object) -> object:
        copies.append(weakref.ref(partial))
        return prepare(partial, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(type(starter._site), "prepare", lambda _, *arguments: watched(*arguments))
    flight = starter.start(torch.ones(HIDDEN, 4, dtype=torch.bfloat16).t(), EpilogueOperands())
    gc.collect()
    assert flight is not None and copies[0]() is not None
    flight.end()
    del flight
    gc.collect()
    assert copies[0]() is None


def test_calls_in_flight_share_no_buffer_with_calls_in_line() -> None:
    table = (*TABLE, KernelRow(512, Algorithm.TWO_SHOT, Transfer.DIRECT))
    in_line, in_flight = make_call(table=table, max_tokens=512), begun(table=table, max_tokens=512)
    plan = memory_plan("tp", [in_line, in_flight])
    owned = {buffer.name: buffer for buffer in plan.buffers if buffer.name.endswith("in flight")}
    others = [buffer for buffer in plan.buffers if buffer.name not in owned]
    assert {buffer.name for buffer in others} == {name.removesuffix(" in flight") for name in owned}
    assert all(buffer.lifetime is Lifetime.ARENA for buffer in owned.values()), "a call in flight outlives its site"
    layout = Layout.of(plan)
    a, b = locate(in_line, layout), locate(in_flight, layout)
    assert a.keys() == b.keys() and len(a) == 4
    for name in a:
        ends = sorted((at.offset, at.offset + at.num_bytes) for at in (a[name], b[name]))
        assert ends[0][1] <= ends[1][0], f"{name} overlaps: {ends}"
    mailboxes = owned[buffer_name(MAILBOXES, Fabric.PEER, begun=True)]
    assert mailboxes.fill == next(buffer.fill for buffer in others if buffer.name == MAILBOXES) is not None


def test_cpu_ranks_have_one_set_of_buffers() -> None:
    """There a call in line waits for those in flight."""
    assert buffer_name(MAILBOXES, Fabric.TCP, begun=True) == MAILBOXES
    assert communication_channel() == _native.NUM_CHANNELS - 1


def test_rows_in_flight_never_alias_the_arena() -> None:
    with pytest.raises(WeaveError, match="in flight"):
        decode(begun(normalized_aliases_arena=True).encode())
