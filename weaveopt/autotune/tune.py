"""Tune: local kernels that the decision for a graph rests on are timed on the ranks that will run it.

Where the graph is compiled on the devices of its machine, each kernel that a price asks for (`asked_kernels`) is timed
once at its exact shape, by all ranks at once, within a budget, what may turn a choice first. All ranks then use the
longest times, and keep them on disk. A rank that compiles a frame again takes what its ranks agreed on before. Where no
device is there, nothing is timed, and the report says which choices rest on a price between measured ones.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from weaveopt.autotune.asked_kernels import AskedKernel, AskedPrices
from weaveopt.autotune.device_class import device_class
from weaveopt.autotune.kernel_calls import is_own
from weaveopt.autotune.kernel_exchange import KernelExchange, NoAgreementError
from weaveopt.autotune.kernel_store import KernelStore, LeftKernel, can_read, folder_of
from weaveopt.autotune.kernel_timing import KernelTimings, take_all_s, time_kernels
from weaveopt.config import LONGEST_S
from weaveopt.cost_model.gemm import was_measured
from weaveopt.cost_model.timed import NOTHING_TIMED, KernelShape, KernelTime, TimedKernels
from weaveopt.fabrics import topology
from weaveopt.graph.facts import runs_on_gpu
from weaveopt.graph.values import bytes_of, tensors_of
from weaveopt.inductor.calls import name_of
from weaveopt.inductor.dynamo import Compile, current_compile
from weaveopt.inductor.loops import GATHERS
from weaveopt.pipeline.compilation import Tunes
from weaveopt.pipeline.frame_memory import FrameMemory
from weaveopt.pipeline.problem import ProblemTemplate
from weaveopt.records.report import Doubt, KernelReport
from weaveopt.rule import CapturedGraph, Context, FoundSite, RuleSet
from weaveopt.wording import counted, named

SECONDS_A_NODE = 0.0008
"""Share of the budget that a node of the graph brings, so that small graphs do not wait for it."""

SECONDS_A_GRAPH = 0.15
"""Share of the budget that every graph brings: to generate its code takes seconds. Four layers of a decoder, which
compile in five on a GPU host (suite `unseen_shapes`), bring some 0.4 s with both."""

GPU_BUDGET_S = 5.0
"""Budget on GPUs where the option says none. Processes on CPUs share cores with whatever else runs on the host."""

SECONDS_A_STAND_IN = 2.0
"""The same of a graph on GPUs without a profile, where nothing but times decides."""

_WEIGHING = 0.3
"""Largest share of the budget for finding out which kernels matter."""


@dataclass(frozen=True)
class Tuned:
    """Times of local kernels, and what there is to say of them."""

    times: TimedKernels = NOTHING_TIMED
    kernels: tuple[KernelReport, ...] = ()
    """Kernels whose time counts, longest first."""
    line: str = ""
    """How many were timed; empty where nothing was asked for."""
    doubts: tuple[Doubt, ...] = ()


NOT_TUNED = Tuned()


@dataclass
class _AgreedTimes:
    """Times that the ranks of one frame's groups agreed on."""

    groups: tuple[weakref.ref[dist.ProcessGroup], ...] = ()
    times: dict[KernelShape, KernelTime] = field(default_factory=dict)
    budgets: dict[KernelShape, float] = field(default_factory=dict)
    """Kernel -> the largest budget under which the ranks asked for its time."""

    def settles(self, asked: Sequence[AskedKernel], groups: Sequence[str], budget_s: float) -> bool:
        """True if the same ranks asked for all these times before, and nothing more is to be had."""
        now = [topology.process_group(name) for name in groups]
        if [reference() for reference in self.groups] != now:
            return False
        return all(each.shape in self.times or self.budgets.get(each.shape, -1.0) >= budget_s for each in asked)

    def keep(
        self, asked: Sequence[AskedKernel], groups: Sequence[str], budget_s: float,
        times: Mapping[KernelShape, KernelTime],
    ) -> None:  # fmt: skip
        self.groups = tuple(weakref.ref(topology.process_group(name)) for name in groups)
        self.times.update(times)
        for each in asked:
            self.budgets[each.shape] = max(budget_s, self.budgets.get(each.shape, 0.0))


_memories = FrameMemory(_AgreedTimes)


def tune(
    captured: CapturedGraph, sites: Sequence[FoundSite] | None, rules: RuleSet, context: Context, asked: Tunes
) -> Tuned:
    """Time the kernels of a graph. `sites` is None where a step failed on this rank, whose peers must not wait for it.

    A failure costs the times and no rewrite: profiles decide then.
    """
    if asked is not Tunes.TIMES:
        return _doubts(captured, sites, rules, context) if sites and asked is Tunes.DOUBTS else NOT_TUNED
    topologies = [context.topologies[name] for name in captured.groups]
    device = "cuda" if runs_on_gpu(captured.graph) else "cpu"
    why = _against(captured, context, device)
    if why is not None:
        return Tuned(line=why)
    if sites is not None and not sites and not captured.groups:
        return NOT_TUNED  # no choice rests on anything
    per_host = max((each.world // each.num_hosts for each in topologies), default=1)
    store = KernelStore(folder_of(context.config.tune_cache), device_class(device, per_host))
    tuning = _Tuning(captured, sites, rules, context, store, torch.device(device))
    compile_ = current_compile()
    memory = _memories.of(compile_)
    try:
        return tuning.run(compile_, memory)
    except NoAgreementError as error:
        return Tuned(TimedKernels(memory.times.values()), line=f"no kernel was timed: {error}")


def _against(captured: CapturedGraph, context: Context, device: str) -> str | None:
    """Why nothing is timed; the same on all ranks. Empty where that is not worth a line."""
    machine = context.machine
    topologies = [context.topologies[name] for name in captured.groups]
    if _most_s(context) <= 0.0 or any(known.fake for known in topologies):
        return ""
    if machine.device != device or (device == "cuda" and not torch.cuda.is_available()):
        return ""
    if any(machine.oversubscription(known.world, known.num_hosts) > 1.0 for known in topologies):
        return "no kernel was timed: ranks share cores, and single times say nothing there"
    return None


def _most_s(context: Context) -> float:
    """The option `tune_budget_s`, or its default for this machine."""
    asked_s = context.config.tune_budget_s
    if asked_s is None:
        return GPU_BUDGET_S if context.machine.device == "cuda" else 0.0
    return asked_s


class _Tuning:
    """The kernels of one graph on this rank."""

    def __init__(
        self, captured: CapturedGraph, sites: Sequence[FoundSite] | None, rules: RuleSet, context: Context,
        store: KernelStore, device: torch.device,
    ) -> None:  # fmt: skip
        self._captured, self._context, self._store, self._device = captured, context, store, device
        self._failure = ""
        self._timings = KernelTimings(())
        self._prices: AskedPrices | None = None
        self._asked: tuple[AskedKernel, ...] = ()
        if sites:
            self._attempt(lambda: self._ask(ProblemTemplate(captured, sites, rules, context)))

    def _ask(self, frame: ProblemTemplate) -> None:
        self._prices = AskedPrices(self._captured, frame, self._context)
        self._asked = self._prices.kernels()

    def run(self, compile_: Compile, memory: _AgreedTimes) -> Tuned:
        """Exchange what is known, time what some rank lacks, and exchange again. Raises `NoAgreementError`."""
        budget_s = self._budget_s()
        groups = () if self._prices is None else self._prices.groups
        if compile_.attempt and memory.settles(self._asked, groups, budget_s):
            return self._tuned(memory.times, len(memory.times), KernelTimings(()), 0.0)
        exchange, found = KernelExchange(self._captured, groups, compile_, self._context), self._store.read()
        known = {each.shape: found.times[each.shape] for each in self._asked if each.shape in found.times}
        num_known = len(known)
        missing = [each for each in self._asked if not found.is_settled(each.shape, budget_s)]
        shared = exchange.shared(known.values(), len(missing))
        times, timings, took_s = shared.times, KernelTimings(()), 0.0
        if shared.num_missing:
            # The first exchange was a barrier: all ranks draw power at once, as in the model.
            began = time.perf_counter()
            self._attempt(lambda: self._time([each for each in missing if each.shape not in times], budget_s))
            timings, took_s = self._timings, time.perf_counter() - began
            fresh = {**times, **{each.shape: each for each in timings.times}}
            times = exchange.shared(fresh.values(), 0, more_s=budget_s).times
        learned = [times[each.shape] for each in self._asked if each.shape in times and each.shape not in known]
        left = [LeftKernel(shape, budget_s) for shape in timings.left]
        left += [LeftKernel(shape, LONGEST_S) for shape in timings.failed]
        if (learned or left) and not self._store.add(learned, left):
            self._failure = self._failure or f"{self._store.folder} cannot be written"
        memory.keep(self._asked, groups, budget_s, times)
        return self._tuned(times, num_known, timings, took_s)

    def _tuned(
        self, times: Mapping[KernelShape, KernelTime], num_known: int, timings: KernelTimings, took_s: float
    ) -> Tuned:
        rows = self._rows(times)
        unsteady = sum(each.shape in times for each in self._asked) - len(rows)
        return Tuned(TimedKernels(times.values()), rows, self._line(num_known, timings, took_s, unsteady))

    def _time(self, lacking: Sequence[AskedKernel], budget_s: float) -> None:
        if self._prices is None:
            return
        began = time.perf_counter()
        order, left = lacking, list[KernelShape]()
        if take_all_s(lacking, self._device.type) > budget_s:  # else their order is of no matter
            weighed = self._prices.weighed(lacking, self._context.machine.relative_error, _WEIGHING * budget_s)
            order = in_turn(weighed, budget_s, self._device.type)
            # Triton compiles for longer than all else here takes: for a choice, not for a better price.
            left = [each.shape for each in order if is_own(each.shape) and each.is_known and not each.loss_us]
            order = [each for each in order if each.shape not in left]
        rest_s = budget_s - (time.perf_counter() - began)
        timings = time_kernels(order, self._device, rest_s, _weight_bytes(self._captured))
        self._timings = replace(timings, left=(*timings.left, *left))

    def _budget_s(self) -> float:
        fixed_s = SECONDS_A_STAND_IN if self._context.machine.stands_in else SECONDS_A_GRAPH
        return min(_most_s(self._context), fixed_s + SECONDS_A_NODE * len(self._captured.graph.nodes))

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do a part of the work that peers need not hear of when it fails."""
        try:
            work()
        except Exception as error:  # whatever went wrong, the profile's prices are there
            self._failure = named(error)

    def _rows(self, times: Mapping[KernelShape, KernelTime]) -> tuple[KernelReport, ...]:
        rows = [
            KernelReport(str(each.shape), times[each.shape].us, round(each.us, 3), times[each.shape].relative_error)
            for each in self._asked
            if each.shape in times and times[each.shape].is_surer(each.us)
        ]
        return tuple(sorted(rows, key=lambda row: (-row.us, row.kernel)))

    def _line(self, num_known: int, timings: KernelTimings, took_s: float, unsteady: int) -> str:
        if not self._asked and not self._failure:
            return ""
        line = f"{counted(len(timings.times), 'kernel')} timed in {took_s:.2f} s, {num_known} known from before"
        if timings.left:
            line += f", {len(timings.left)} left to the profile: the budget is spent (option tune_budget_s)"
        if timings.failed:
            line += f", {len(timings.failed)} cannot be timed alone"
        if not can_read():
            line += ", none read from disk: msgspec is not installed"
        if unsteady:
            line += f", {unsteady} left to the profile: times that spread so wide are less sure than it"
        return line + (f"; {self._failure}" if self._failure else "")


def in_turn(weighed: Sequence[AskedKernel], budget_s: float, device: str) -> list[AskedKernel]:
    """The order of timing: first what the captured graph runs, if that leaves half of the budget; then by worth."""
    order = sorted(weighed, key=lambda each: each.worth, reverse=True)
    first = [each for each in order if each.is_captured]
    if take_all_s(first, device) > budget_s / 2:
        return order
    return [*first, *(each for each in order if not each.is_captured)]


def _weight_bytes(captured: CapturedGraph) -> int:
    """Bytes of the graph's inputs that it reads whole: of an embedding's table it reads a row a token."""
    inputs = (node for node in captured.graph.nodes if node.op == "placeholder")
    whole = (node for node in inputs if not all(name_of(user.target)[1] in GATHERS for user in node.users))
    return sum(bytes_of(value) for node in whole for value in tensors_of(node))


def _doubts(captured: CapturedGraph, sites: Sequence[FoundSite], rules: RuleSet, context: Context) -> Tuned:
    """The choices of a graph that hang on a price which the profile did not measure, where no device is there."""
    prices = AskedPrices(captured, ProblemTemplate(captured, sites, rules, context), context)
    machine = context.machine
    unmeasured = [each for each in prices.kernels() if not was_measured(machine, each.shape)]
    weighed = [each for each in prices.weighed(unmeasured, machine.relative_error) if each.turns]
    found = []
    for each in sorted(weighed, key=lambda each: each.worth, reverse=True):
        names = tuple(sites[index].site.id for index in each.turns)
        found.append(Doubt(names, str(each.shape), round(each.us, 3), round(each.loss_us, 3)))
    return Tuned(doubts=tuple(found))
