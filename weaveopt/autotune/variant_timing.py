"""Variants timed: the captured graph and each of its variants, as they were decided, run whole on the ranks in turns.

They share one set of made-up inputs: random floating-point numbers, zeros for whole numbers, true for flags. So where
the time of a graph rests on such values (how far a cache is filled), it is that of zeros in all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from weaveopt.autotune.candidate_run import CandidateRun, Make, copied
from weaveopt.autotune.graph_part import GraphPart, HintedSizes, whole_of
from weaveopt.autotune.rank_agreement import GroupAgreement, RankAgreement, SingleRank
from weaveopt.autotune.timed_runs import RAISED, TimedRuns, clock_of
from weaveopt.measure.clock import Meeting
from weaveopt.pipeline.bind import reserve
from weaveopt.pipeline.decide import DecidedGraph, settle
from weaveopt.pipeline.plan import plan
from weaveopt.pipeline.recognize import recognize
from weaveopt.pipeline.rewrite import rewrite
from weaveopt.records.candidate import Measured, Rejection
from weaveopt.records.memory import MemoryPlan
from weaveopt.rule import Chosen, Context, RuleSet
from weaveopt.wording import counted, named


@dataclass(frozen=True)
class TimedVariants:
    """Measured times and failures by position among the decided graphs, and a line about them."""

    times: Mapping[int, Measured] = field(default_factory=dict)
    failures: Mapping[int, Rejection] = field(default_factory=dict)
    line: str = ""


def time_variants(
    decided: Sequence[DecidedGraph], rules: RuleSet, context: Context, make: Make, share_of_memory: float = 0.5
) -> TimedVariants:
    """Time every graph of `decided`, the captured one first; no times where the predictions have to decide.

    Nothing is timed where the inputs would take more than `share_of_memory` of what is free. Raises `AgreementError`
    and `PeerTimeoutError` as every operation does.
    """
    captured = decided[0].priced.captured
    topologies = {name: context.topologies[name] for name in captured.groups}
    if any(known.fake for known in topologies.values()):
        return TimedVariants()
    groups = tuple(sorted(name for name, known in topologies.items() if known.world > 1))
    agreement = RankAgreement(groups, context.config.compile_timeout_s)
    if not agreement.alike(dict.fromkeys(groups, "\n".join(map(_words_of, decided)))):
        return TimedVariants(line="variants: not timed: the ranks have others")  # agree says which
    if len(decided) == 1:
        return TimedVariants()
    timed = TimedRuns[int](agreement, context.config.verify_budget_s)
    found = _timed(decided, rules, context, make, timed, share_of_memory)
    if isinstance(found, str):
        return TimedVariants(failures=_but_first(timed.failures), line=f"variants: {found}")
    said = f"variants: {counted(len(found), 'graph')} timed whole"
    if timed.failures:
        said += f", {len(timed.failures)} could not be run"
    return TimedVariants(found, timed.failures, said)


def _but_first(failures: Mapping[int, Rejection]) -> dict[int, Rejection]:
    return {index: why for index, why in failures.items() if index}


def _timed(
    decided: Sequence[DecidedGraph], rules: RuleSet, context: Context, make: Make, timed: TimedRuns[int], share: float
) -> dict[int, Measured] | str:
    """Times by position; or why nothing was timed."""
    if timed.has_ended(0.0):
        return timed.ended
    captured, device = decided[0].priced.captured, context.machine.device
    try:
        sizes = HintedSizes.of(captured.symbolic_tokens, captured.tokens)
        num_bytes = whole_of(captured.graph, sizes).num_bytes
        why = "" if num_bytes <= share * _free_bytes(device) else f"its inputs take {num_bytes} bytes of their own"
    except Exception as error:
        sizes, why = HintedSizes(), named(error)
    if timed.failed(0, why):
        return f"not timed: {timed.failures[0].message}"
    inputs: list[torch.Tensor] | None = None
    runs: dict[int, CandidateRun] = {}
    for index, each in enumerate(decided):
        run, why = None, ""
        try:
            part, plans = _rewritten(each, rules, context, sizes)
            with unset_fake_temporarily(), torch.no_grad():
                inputs = inputs or part.real_inputs()
                run = CandidateRun(make(part.module, inputs), (inputs,), plans)
        except RAISED:
            raise
        except Exception as error:  # whatever went wrong, the others must not wait for it
            why = named(error)
        if timed.failed(index, why):
            continue
        assert run is not None
        whys = [reserve(needed, context) for needed in run.plans]
        if not timed.failed(index, "; ".join(filter(None, whys))):
            runs[index] = run
    expected_us = {} if 0 in timed.failures else timed.tried(runs)
    if 0 in timed.failures:
        return f"not timed: {timed.failures[0].message}"
    clock = clock_of(device)
    if timed.has_ended(sum(clock.takes_s(us) for us in expected_us.values())):
        return timed.ended
    return timed.times(runs, expected_us, clock, _meeting(decided, context))


def _words_of(decided: DecidedGraph) -> str:
    captured = decided.priced.captured
    sites = [f"{each.found.site.id} {each.proposal.candidate.choice}" for each in decided.chosen]
    return f"{captured.variant} {captured.parameters} {sites}"


def _meeting(decided: Sequence[DecidedGraph], context: Context) -> Meeting:
    for group in decided[0].priced.captured.groups:
        if context.topologies[group].world > 1:
            return GroupAgreement(group, context.config.compile_timeout_s)
    return SingleRank()


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _rewritten(
    decided: DecidedGraph, rules: RuleSet, context: Context, sizes: HintedSizes
) -> tuple[GraphPart, tuple[MemoryPlan, ...]]:
    """A copy of a decided graph with its choices carried out, and the memory that it needs."""
    priced = decided.priced
    captured = replace(priced.captured, graph=copied(priced.captured.graph))
    sites = recognize(captured, rules, context)
    ids = [each.site.id for each in priced.frame.sites]
    assert [each.site.id for each in sites] == ids, f"a copy of the graph has other sites than {ids}"
    found = [replace(new, site=old.site) for new, old in zip(sites, priced.frame.sites, strict=True)]
    chosen = tuple(
        Chosen(each, priced.frame.proposals(each)[position])
        for each, position in zip(found, decided.positions, strict=True)
        if position is not None
    )
    copy = replace(
        decided, priced=replace(priced, captured=captured), chosen=settle(chosen, rules, context), timeline=None
    )
    planned = plan(copy, rules, context)
    rewrite(copy, planned, rules, context)
    return whole_of(captured.graph, sizes), planned.plans
