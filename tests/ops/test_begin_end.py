"""`all_reduce_norm` begun and ended by two operators, on CPU ranks: bitwise the operator in line, with work between."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.fx as fx
from torch import Tensor

import weaveopt.ops  # noqa: F401
from tests.graphs.tolerances import KERNEL, assert_close
from tests.inductor import test_order as two_halves
from tests.ranks import collect, run_ranks, shm_ranks
from tests.ranks.tcp_ranks import HIDDEN, MAX_TOKENS, become_host, make_call, partial_of, reserve
from weaveopt.backend import optimize
from weaveopt.config import Config
from weaveopt.errors import WeaveError
from weaveopt.fabrics import tcp
from weaveopt.fabrics.call_queue import CallQueue
from weaveopt.inductor import seams
from weaveopt.inductor.order import keeping
from weaveopt.ops.collective_wait.place import place
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.variant import ALGORITHMS, Algorithm, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.order import ANY_ORDER
from weaveopt.records.site import TokenCounts
from weaveopt.reporting import registry
from weaveopt.rewrites import RULES
from weaveopt.rewrites.hierarchical_all_reduce.rule import HierarchicalAllReduce
from weaveopt.rewrites.reduction import fused
from weaveopt.rule import Context, FoundSite, Proposal, RuleSet

WORLD = 2
TOKENS = (5, 0, 40, 17, MAX_TOKENS + 3)
"""The last count runs through the library."""


def make_operands(tokens: int, hidden: int) -> EpilogueOperands:
    random = torch.Generator().manual_seed(tokens)
    residual = torch.randn(tokens, hidden, generator=random)
    return EpilogueOperands(residual=residual, weight=torch.linspace(0.5, 1.5, hidden), reduced_bias=torch.ones(hidden))


def begin(call: ReductionCall, partial: Tensor, operands: EpilogueOperands) -> list[Tensor]:
    results: list[Tensor] = torch.ops.weave.all_reduce_norm_begin(partial, *operands, call.encode())
    return results


def end(call: ReductionCall, results: list[Tensor], partial: Tensor, operands: EpilogueOperands) -> None:
    in_use = [partial, *(each for each in operands if each is not None)]
    torch.ops.weave.all_reduce_norm_end(results, in_use, [], call.encode())


def in_line(call: ReductionCall, partial: Tensor, operands: EpilogueOperands) -> list[Tensor]:
    return list(torch.ops.weave.all_reduce_norm(partial, *operands[:7], call.encode()))


def compare(rank: int, calls: Sequence[ReductionCall], hidden: int) -> int:
    """Every call twice in flight at once and once in line; how many results are bitwise those of the calls in line."""
    count = 0
    for tokens in TOKENS:
        operands = make_operands(tokens, hidden)
        partials = [torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(97 * i + rank)) for i in (0, 1)]
        for call in calls:
            begun = [replace(call, begun=True, site=f"{call.site} half {half}") for half in (0, 1)]
            wanted = [in_line(call, partial, operands) for partial in partials]
            flights = [begin(each, partial, operands) for each, partial in zip(begun, partials, strict=True)]
            between = in_line(call, partials[0], operands)  # in line, after the calls in flight
            for each, results, partial in zip(begun, flights, partials, strict=True):
                end(each, results, partial, operands)
            for got, want in zip([*flights, between], [*wanted, wanted[0]], strict=True):
                for a, b in zip(got, want, strict=False):
                    assert a.dtype == b.dtype and torch.equal(a, b), f"{call.site}, {tokens} tokens"
                    count += 1
    return count


def on_tcp(rank: int, world: int, hosts: int) -> int:
    become_host(rank, world, hosts)
    reserve(world, hosts)
    calls = [make_call(world, hosts, algorithm) for algorithm in ALGORITHMS[Transfer.MESSAGE]]
    calls += [replace(calls[0], sum_out=SumOut.NONE), replace(calls[0], norm=None)]
    found = compare(rank, calls, HIDDEN)
    tcp.release_all()
    assert not any(thread.name.startswith("weaveopt 0") for thread in threading.enumerate())
    return found


@pytest.mark.parametrize(("world", "hosts"), [(2, 2), (4, 2), (3, 3)])
def test_on_tcp_calls_in_flight_are_those_in_line(world: int, hosts: int) -> None:
    assert run_ranks(on_tcp, world, world, hosts) == [len(TOKENS) * 6 * 6] * world


def on_shm(rank: int) -> int:
    shm_ranks.reserve()
    call = shm_ranks.make_call("one shot", "0", WORLD, one_shot=True)
    return compare(rank, [call], shm_ranks.HIDDEN)


def test_on_shm_calls_run_when_they_are_begun() -> None:
    assert run_ranks(on_shm, WORLD) == [len(TOKENS) * 6] * WORLD


def through_the_library(rank: int) -> int:
    call = replace(make_call(WORLD, 1), fabric=Fabric.LIBRARY, table=(), hosts=1)
    return compare(rank, [call, replace(call, norm=None)], HIDDEN)


def test_the_librarys_calls_are_begun_too() -> None:
    assert run_ranks(through_the_library, WORLD) == [len(TOKENS) * 2 * 6] * WORLD


def in_inference_mode(rank: int) -> bool:
    become_host(rank, WORLD, WORLD)
    reserve(WORLD, WORLD)
    call = replace(make_call(WORLD, WORLD), begun=True)
    operands, partial = make_operands(5, HIDDEN), partial_of(rank, 5, 0, torch.float32)
    with torch.inference_mode():
        first = begin(call, partial, operands)
        end(call, first, partial, operands)
    second = begin(call, partial.requires_grad_(), operands)
    end(call, second, partial, operands)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and first[0].is_inference()


def test_in_inference_mode_and_without() -> None:
    assert run_ranks(in_inference_mode, WORLD) == [True] * WORLD


def misused(rank: int) -> list[str]:
    become_host(rank, WORLD, WORLD)
    reserve(WORLD, WORLD)
    call = replace(make_call(WORLD, WORLD), begun=True)
    operands, partial = make_operands(5, HIDDEN), partial_of(rank, 5, 0, torch.float32)
    results = begin(call, partial, operands)
    texts = []
    for given in ([each.clone() for each in results], results):
        with pytest.raises(WeaveError) as error:
            end(call, given, partial, operands)
        texts.append(str(error.value))
    # A begin whose end never came holds nothing up.
    begin(call, partial, operands)
    again = begin(call, partial, operands)
    end(call, again, partial, operands)
    assert torch.equal(again[0], in_line(replace(call, begun=False), partial, operands)[0])
    return texts


def test_results_of_another_call_are_refused() -> None:
    for texts in run_ranks(misused, WORLD):
        assert "has other results" in texts[0] and "no call is in flight" in texts[1]


def fails(rank: int, how: str) -> tuple[str, str, float]:
    """The last rank is killed or never comes, while the others' calls are in flight."""
    become_host(rank, WORLD, WORLD)
    reserve(WORLD, WORLD)
    call = replace(make_call(WORLD, WORLD, Algorithm.TWO_SHOT, timeout_s=2.0), begun=True)
    second = replace(call, site="second")
    operands, partial = make_operands(5, HIDDEN), partial_of(rank, 5, 0, torch.float32)
    for each in (call, second):
        end(each, begin(each, partial, operands), partial, operands)
    if rank == WORLD - 1:
        if how == "killed":
            os.kill(os.getpid(), 9)
        time.sleep(6.0)
        return "", "", 0.0
    started = time.monotonic()
    results = begin(call, partial, operands)
    after = begin(second, partial, operands)
    begun_s = time.monotonic() - started
    errors = []
    for each, given in ((call, results), (second, after)):
        with pytest.raises(WeaveError) as error:
            end(each, given, partial, operands)
        errors.append(error.value)
    assert begun_s < 1.0, "a begin waits for nobody"
    return type(errors[0]).__name__, " ".join(map(str, errors)), time.monotonic() - started


@pytest.mark.parametrize("how", ["killed", "late"])
def test_the_end_raises_what_became_of_a_call_in_flight(how: str) -> None:
    first, *_ = collect(fails, WORLD, how)
    assert not first.error, first.error
    name, text, seconds = first.value  # type: ignore[misc]
    assert name == "PeerTimeoutError" and "all_reduce_norm_begin at site" in text and "unusable" in text
    assert seconds < 8.0


def test_a_queue_keeps_order_and_errors() -> None:
    queue, seen = CallQueue("test"), list[int]()
    gate = threading.Event()

    def step(number: int) -> None:
        gate.wait(10.0)
        seen.append(number)
        if number == 1:
            raise ValueError("the second one")

    calls = [queue.begin(lambda number=number: step(number)) for number in range(3)]  # type: ignore[misc]
    assert not seen
    gate.set()
    queue.drain()
    assert seen == [0, 1, 2]
    calls[0].wait()
    calls[2].wait()
    with pytest.raises(ValueError, match="second"):
        calls[1].wait()
    queue.close()
    assert not any(thread.name == "weaveopt test" for thread in threading.enumerate())
    queue.begin(lambda: seen.append(3)).wait()  # a queue that was closed begins again
    queue.close()
    assert seen == [0, 1, 2, 3]


# --- in a compiled graph ----------------------------------------------------------------------------------------------


class Begun(HierarchicalAllReduce):
    """The rule, with every exchange begun and ended."""

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        return fused.propose(self.name, found, tokens, context, usable_only, between_hosts=True, begun=True)


def compiled(rank: int, rule: HierarchicalAllReduce) -> tuple[list[str], list[str], bytes]:
    """Two halves through Inductor: operators of the rewritten graph, communication as it was written, the result."""
    become_host(rank, WORLD, WORLD)
    weights = two_halves.make_weights()
    x = torch.randn(two_halves.ROWS, two_halves.HIDDEN, generator=torch.Generator().manual_seed(0))
    config = Config(force=(rule.name,), strict=True, timeout_s=20.0, compile_timeout_s=60.0)
    rules = RuleSet(RULES.matchers, (rule,))
    written: list[str] = []
    operators: list[str] = []

    def inner(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
        two_halves.sink_waits(module.graph)
        optimize(module, inputs, seams.GraphPass.of(arguments), config, registry.open_entry(()), rules)
        order = place(module.graph, two_halves.ORDER) if isinstance(rule, Begun) else ANY_ORDER
        module.graph.lint()
        module.recompile()
        operators.extend(str(node.target) for node in module.graph.nodes if "all_reduce" in str(node.target))
        with keeping(ANY_ORDER) as names:
            result = seams.compile_graph(module, inputs, arguments, order=order)
        written.extend(name for name in names if name.startswith(("all_reduce", "wait")))
        return result

    def backend(module: fx.GraphModule, inputs: Sequence[object]) -> object:
        return seams.compile_with(inner, module, inputs)

    with torch.inference_mode(), torch._inductor.config.patch(force_disable_caches=True):
        expected = two_halves.halves(weights, x)
        run = torch.compile(lambda x: two_halves.halves(weights, x), backend=backend, fullgraph=True)
        found = run(x)
        for _ in range(3):
            assert torch.equal(run(x), found)
    assert_close(found, expected, KERNEL)
    return operators, written, found.numpy().tobytes()


def test_two_halves_begin_and_end_in_turns_under_compile() -> None:
    """As in line bit for bit, with the other half's stage between begin and end."""
    begun = run_ranks(compiled, WORLD, Begun())
    plain = run_ranks(compiled, WORLD, HierarchicalAllReduce())
    for operators, written, found in begun:
        assert sum("begin" in name for name in operators) == sum("end" in name for name in operators) > 0
        assert two_halves.in_turns(written), written
        assert found == plain[0][2] == plain[1][2]
    assert all("begin" not in name for name in plain[0][0]) and plain[0][0]
