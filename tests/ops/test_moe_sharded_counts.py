"""Token counts that GPU ranks with batches of their own exchange through their hosts, and the calls that use them.

The counts are the real ones, on spawned ranks. The library's exchange replaces the kernels, and tensors are the CPU's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from tests.ops.test_expert_exchange import MAX_TOKENS, Form, Inputs, make_call, make_inputs, wanted
from tests.ranks import run_ranks
from tests.ranks.simulated import TEST_ALL
from weaveopt.errors import AgreementError, ArenaError, PeerTimeoutError, WeaveError
from weaveopt.fabrics import peer as peer_arena
from weaveopt.fabrics import shm, topology
from weaveopt.ops.experts import gpu
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.exchange.library import through_library
from weaveopt.ops.experts.sharded import counts, op
from weaveopt.ops.experts.sharded.counts import ExchangedCounts
from weaveopt.ops.experts.sharded.op import CAPTURABLE, NAME
from weaveopt.ops.experts.sharded.peer import PeerExpertExchange
from weaveopt.records.candidate import Fabric

TIMEOUT_S = 30.0


def call_of(world: int, site: str = "a", timeout_s: float = TIMEOUT_S) -> ExpertExchangeCall:
    call = make_call(Form(), "bfloat16", world)
    return replace(call, site=site, fabric=Fabric.PEER, same_tokens=False, timeout_s=timeout_s)


def counts_of(call: ExpertExchangeCall) -> ExchangedCounts:
    counts.reserve(topology.discover(call.group, TIMEOUT_S), replace(call, timeout_s=TIMEOUT_S))
    return ExchangedCounts(call, call.encode(), NAME, lambda: None)


def run_many_calls(rank: int, world: int, num_calls: int) -> None:
    """Two sites in turn, ranks at any time: whoever reads a count of another call sees a wrong maximum."""
    sites = [counts_of(call_of(world, site)) for site in ("a", "b")]
    shared, own = random.Random(world), random.Random(100 * world + rank)
    for at in some(range(num_calls)):
        told = [shared.choice((0, 0, 1, 7, 600, 1 << 24, 1 << 40)) * shared.randrange(3) for _ in range(world)]
        if own.random() < 0.02:
            time.sleep(own.random() * 1e-3)
        assert sites[at % 2].largest(told[rank]) == max(told), f"call {at}: {told}"


MANY = {1: 20, 2: 20_000, 3: 5000, 4: 2000} if TEST_ALL else {1: 20, 2: 5000, 3: 2000, 4: 2000}
"""Calls by ranks."""


@pytest.mark.parametrize(("world", "num_calls"), MANY.items())
def test_all_ranks_learn_the_largest(world: int, num_calls: int) -> None:
    run_ranks(run_many_calls, world, world, num_calls, timeout_s=200)


def run_other_site(rank: int) -> None:
    site = counts_of(call_of(2, site=f"site of rank {rank}"))
    with pytest.raises(AgreementError, match=f"runs site site of rank {rank} with 0 tokens, but rank {1 - rank} runs"):
        site.largest(1)
    dist.barrier()


def test_ranks_at_different_sites() -> None:
    run_ranks(run_other_site, 2)


def run_absent(rank: int) -> None:
    site = counts_of(call_of(2, timeout_s=1.0))
    assert site.largest(rank) == 1
    if rank == 0:
        with pytest.raises(PeerTimeoutError, match=r"peer rank 1 did not signal within 1 s \(slot ready"):
            site.largest(1)
        with pytest.raises(PeerTimeoutError, match="the arena is unusable since an earlier call failed"):
            site.largest(1)
    dist.barrier()


def test_a_rank_that_does_not_come() -> None:
    run_ranks(run_absent, 2)


class _Arena:
    """Nothing is launched in it."""

    error: WeaveError | None = None

    def begin_call(self) -> None:
        if self.error is not None:
            raise self.error


def stand_in(seen: list[int]) -> Callable[..., PeerExpertExchange]:
    """A `PeerExpertExchange.bind` without a GPU; how much room each source had in the calls goes into `seen`."""

    def exchange(
        self: PeerExpertExchange, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, *rest: object
    ) -> object:
        operands, _, slot_tokens = rest
        assert isinstance(slot_tokens, int) and len(x) <= slot_tokens <= self._call.max_tokens
        seen.append(slot_tokens)
        return through_library(x, experts, weights, operands, self._call)  # type: ignore[arg-type]

    def bind(call: ExpertExchangeCall, text: str, name: str, forget: Callable[[], None]) -> PeerExpertExchange:
        site = object.__new__(PeerExpertExchange)
        site._call, site._arena = call, _Arena()  # type: ignore[assignment]
        site._counts = ExchangedCounts(call, text, name, forget)
        slots = call.world * call.max_tokens
        site._rows, site._ids = torch.empty(slots, call.hidden), torch.empty(slots, call.choices)
        return site

    PeerExpertExchange._exchange = exchange  # type: ignore[assignment]
    return bind


def run_on(mine: Inputs, call: ExpertExchangeCall, capturing: bool = False) -> torch.Tensor:
    """As tensors of a GPU would."""
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing):
        return op._run("cuda", mine.x, mine.experts, mine.weights, *mine.operands, call.encode())


def run_calls(rank: int, world: int) -> tuple[list[int], int]:
    """Room of the sources in each call that has kernels, and how many calls went through the library."""
    call, seen, through = call_of(world), [], []

    def library(*args: object) -> torch.Tensor:
        through.append(1)
        return through_library(*args)  # type: ignore[arg-type]

    PeerExpertExchange.bind = staticmethod(stand_in(seen))  # type: ignore[method-assign]
    peer_arena.reserve = lambda *_: None  # type: ignore[assignment,return-value]
    gpu.has_kernels = lambda *_: True
    op.through_library = library
    for at, tokens in enumerate(
        ("even", "uneven", "none", "one has all", "some none", "none", "too many", "uneven", "too many", "none")
    ):
        form = Form()
        inputs = make_inputs(form, call, "uneven" if tokens == "too many" else tokens, "uniform", seed=at)
        if tokens == "too many":
            more = make_inputs(form, replace(call, world=world), "one has all", "uniform", seed=at)[-1]
            last = inputs[-1]
            inputs[-1] = replace(
                last, x=torch.cat((more.x, last.x)), experts=torch.cat((more.experts, last.experts)),
                weights=torch.cat((more.weights, last.weights)),
            )  # fmt: skip
            assert len(inputs[-1].x) > MAX_TOKENS
        assert_close(run_on(inputs[rank], call), wanted(inputs, call)[rank], KERNEL, tokens, torch.bfloat16)
    return seen, len(through)


@pytest.mark.parametrize("world", [2, 3])
def test_calls_have_room_for_the_largest_count(world: int) -> None:
    """Calls without a token run nothing; in those with more than planned all ranks go through the library, and later
    calls are as before."""
    uneven = 1 + 5 * (world - 1)
    want = [7, uneven, MAX_TOKENS, 9, uneven]
    assert run_ranks(run_calls, world, world) == [(want, 2)] * world


def run_without_memory(rank: int) -> None:
    """Rank 1's host has none to share: all go through the library, and warn of the reason."""
    call = call_of(2)
    op.transport = lambda _: peer_arena  # type: ignore[assignment,return-value]
    peer_arena.reserve = lambda *_: None  # type: ignore[assignment,return-value]
    if rank == 1:

        def failing(*_: object) -> None:
            raise ArenaError("no room in /dev/shm")

        shm._fill = failing
    inputs = make_inputs(Form(), call, "uneven", "uniform", seed=1)
    with pytest.warns(UserWarning, match="exchanged through the library: .*rank 1: no room in /dev/shm"):
        got = run_on(inputs[rank], call)
    assert_close(got, wanted(inputs, call)[rank], KERNEL, "", torch.bfloat16)


def test_a_host_without_memory() -> None:
    run_ranks(run_without_memory, 2)


def run_after_failure(rank: int) -> None:
    """A rank whose kernels gave up does not wait for the others' hosts."""
    call = call_of(2)
    counts_of(call)
    site = stand_in([])(call, call.encode(), NAME, lambda: None)
    inputs = make_inputs(Form(), call, "uneven", "uniform", seed=1)[rank]
    site._arena.error = PeerTimeoutError("gave up")
    begun = time.monotonic()
    with pytest.raises(PeerTimeoutError, match="gave up"):
        site.run(inputs.x, inputs.experts, inputs.weights, inputs.operands)
    assert time.monotonic() - begun < TIMEOUT_S / 2


def test_a_rank_whose_kernels_gave_up() -> None:
    run_ranks(run_after_failure, 2)


def test_what_no_graph_can_hold_says_so() -> None:
    own = call_of(2)
    library = replace(own, fabric=Fabric.LIBRARY, same_tokens=True)
    [mine, _] = make_inputs(Form(), own, "even", "uniform", seed=1)
    with pytest.raises(WeaveError, match="CUDA graph cannot hold the call: its ranks hold batches of their own"):
        run_on(mine, own, capturing=True)
    with pytest.raises(WeaveError, match="CUDA graph cannot hold the call: it goes through the process group's"):
        run_on(mine, library, capturing=True)
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        pytest.raises(WeaveError, match="CUDA graph cannot hold the call: its derivative"),
    ):
        op._run_backward("cuda", mine.x, mine.x, mine.experts, mine.weights, *mine.operands, own.encode())


def test_inductor_leaves_it_out_of_cuda_graphs() -> None:
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    for name, overload in ((NAME, "default"), (NAME, "capturable"), (f"{NAME}_backward", "default")):
        graph = torch.fx.Graph()
        graph.output(graph.call_function(getattr(getattr(torch.ops.weave, name), overload), ()))
        found = get_first_incompatible_cudagraph_node(torch.fx.GraphModule({}, graph))
        assert (found is None) == (f"{name}.{overload}" == CAPTURABLE), (name, overload)
