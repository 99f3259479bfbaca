"""Agree: ranks converge on the rewrites that all of them can run, before any of them is carried out.

In every group of the graph each rank publishes what peers must share (`shared_facts`). A rank that rewrites a site of
the group waits for the others' documents; one that does not goes on. A site on which ranks differ is left by all of
them, with the difference as its reason, and what is left changes the decision at its neighbours: ranks decide again
and compare again until nothing differs.

A plan that was agreed before for the same frame is not compared again: a rank may compile a frame again alone. One
that was not agreed cannot be, once the others run the graph that was compiled before: that is an error on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from weaveopt.errors import AgreementError, WeaveError
from weaveopt.fabrics import topology
from weaveopt.fabrics.arena import transport
from weaveopt.fabrics.rounds import WHAT, Closed, Why
from weaveopt.inductor.dynamo import Compile, current_compile
from weaveopt.pipeline.decide import DecidedGraph, decide
from weaveopt.pipeline.frame_memory import FrameMemory
from weaveopt.pipeline.plan import Planned, plan
from weaveopt.pipeline.price import PricedGraph
from weaveopt.pipeline.shared_facts import CODE, Document, Verdict, compare, document
from weaveopt.records.candidate import Fabric, Rejection
from weaveopt.records.report import Decision
from weaveopt.rule import CapturedGraph, Context, RuleSet
from weaveopt.wording import listed, named

_MOST_ROUNDS = 8
"""Each leaves at least one more site; a graph that needs more is left whole."""
_ROUNDS_OF_SEVERAL = 3
"""Rounds of all ranks of groups of which a rank waits in several: what one group leaves changes another's
document, and ranks that share one group alone do not see it."""


@dataclass(frozen=True)
class Agreed:
    """Decision and plan that all ranks carry out."""

    decided: DecidedGraph | None
    """None where a step failed on this rank."""
    planned: Planned
    waiting_groups: tuple[str, ...] = ()
    """Groups with rewritten sites whose ranks compared their documents for this graph, sorted."""
    known: tuple[str, ...] = ()
    """Groups with rewritten sites whose plan was agreed before."""
    several: tuple[str, ...] = ()
    """Groups of `waiting_groups` in which some rank waits in other groups too."""
    failure: str = ""
    """Why the graph is left by all ranks: a step failed on one of them."""


EMPTY = Agreed(None, Planned((), {}))
"""Result in which nothing is carried out."""


def agree(
    every: Sequence[DecidedGraph], best: DecidedGraph | None, rules: RuleSet, context: Context, captured: CapturedGraph,
    failure: str = "",
) -> Agreed:  # fmt: skip
    """Converges with the peers of every group that `captured` communicates in.

    `every` are the decided variants, the captured graph first; `best` the one that was chosen, None where a step failed
    on this rank, for `failure`. Raises `AgreementError` where options, versions or profiles differ, where a rank does
    not come, and where the others already run a graph that this one was never agreed with.
    """
    compile_ = current_compile()
    groups = tuple(sorted(name for name in captured.groups if _is_real(name, context)))
    if best is None:
        return _decline(groups, captured, context, failure, compile_)
    agreement = _Agreement(every, best, rules, context, groups, compile_)
    try:
        return agreement.agree_on_groups()
    except WeaveError:
        raise
    except Exception as error:  # deciding again failed here: the others wait for this rank's next document
        return _decline(tuple(agreement.active), captured, context, f"step 'agree' failed: {named(error)}", compile_)


def _is_real(group: str, context: Context) -> bool:
    known = context.topologies[group]
    return not known.fake and known.world > 1


def _decline(
    groups: Sequence[str], captured: CapturedGraph, context: Context, failure: str, compile_: Compile
) -> Agreed:
    """A step failed here: the others hear of it, and leave the graph too."""
    for group in groups:
        _post(group, document(group, captured, (), (), context, failure=failure), compile_, context, waits=False)
    return replace(EMPTY, failure=failure)


@dataclass
class _Agreement:
    """The state of one convergence."""

    every: Sequence[DecidedGraph]
    current: DecidedGraph
    rules: RuleSet
    context: Context
    groups: tuple[str, ...]
    compile: Compile
    left: dict[str, Rejection] = field(default_factory=dict)
    failure: str = ""
    active: dict[str, bool] = field(default_factory=dict)
    """Groups in which ranks still compare -> True if a rank of it waits in other groups as well."""

    def agree_on_groups(self) -> Agreed:
        planned = plan(self.current, self.rules, self.context)
        memory = _memories.of(self.compile)
        waiting = [group for group in self.groups if self._rewrites(group) or memory.rewrote(group)]
        key = tuple(self._document(group, planned).encode() for group in waiting)
        if key and (before := memory.agreed(key, waiting)) is not None:
            self._leave(before)
            planned = self._decided_again()
            return Agreed(self.current, planned, known=tuple(g for g in waiting if self._rewrites(g)))
        for group in self.groups:
            if group not in waiting:
                _post(group, self._document(group, planned), self.compile, self.context, waits=False)
        planned, several = self._compare(waiting, planned)
        waiting_groups = tuple(group for group in waiting if self._rewrites(group))
        if not self.failure:
            memory.keep(key, waiting, waiting_groups, self.left)
        return Agreed(self.current, planned, waiting_groups, several=several, failure=self.failure)

    def _compare(self, waiting: Sequence[str], planned: Planned) -> tuple[Planned, tuple[str, ...]]:
        active = self.active = dict.fromkeys(waiting, False)
        several: list[str] = []
        for number in range(_MOST_ROUNDS):
            changed = False
            for group in list(active):
                own = self._document(group, planned, len(waiting))
                waits = own.rewrites or number == 0
                found = _post(group, own, self.compile, self.context, waits)
                if found is None:
                    del active[group]  # nothing is left to rewrite here; the others read it
                    continue
                verdict, counts = found
                if number == 0 and max(counts) > 1:
                    active[group] = True
                    several.append(group)
                last = number + 1 == (_ROUNDS_OF_SEVERAL if active[group] else _MOST_ROUNDS)
                if last and not verdict.is_agreed:
                    verdict = Verdict(all_left=Rejection(CODE, f"the ranks did not agree in {number + 1} rounds"))
                changed |= self._take(group, verdict)
                if verdict.all_left or verdict.failure or last or (verdict.is_agreed and not active[group]):
                    del active[group]
            if changed:
                planned = self._decided_again()
            if not active:
                break
        return planned, tuple(several)

    def _take(self, group: str, verdict: Verdict) -> bool:
        """Apply a group's verdict; True if it changes the decision."""
        left, all_left = dict(verdict.left), verdict.all_left
        if verdict.failure:
            self.failure = self.failure or verdict.failure
            all_left = Rejection(CODE, f"a step failed on {verdict.failure}")
        if all_left is not None:
            # Also those that are left now: what is left at a neighbour can make them worth it.
            left = dict.fromkeys((d.site.id for d in self._of(group)), all_left)
        if verdict.captured_only:
            self.current = self.every[0]
        self._leave(left)
        return bool(left) or verdict.captured_only

    def _leave(self, left: Mapping[str, Rejection]) -> None:
        for site, why in left.items():
            self.left.setdefault(site, why)

    def _decided_again(self) -> Planned:
        if self.left:
            self.current = decide(without(self.current.priced, self.left), self.rules, self.context)
        return plan(self.current, self.rules, self.context)

    def _document(self, group: str, planned: Planned, groups: int = 1) -> Document:
        current = self.current
        return document(group, current.priced.captured, current.decisions, planned.plans, self.context, groups)

    def _rewrites(self, group: str) -> bool:
        """True if peers of the group must do the same: a site is rewritten, or the collectives are a variant's."""
        return bool(self.current.priced.captured.rule) or any(decision.rewritten for decision in self._of(group))

    def _of(self, group: str) -> Iterator[Decision]:
        return (decision for decision in self.current.decisions if group in decision.site.groups)


def without(priced: PricedGraph, left: Mapping[str, Rejection]) -> PricedGraph:
    """`priced` with no choice but to leave the sites of these ids, each for its reason."""
    sites = []
    for site in priced.problem.sites:
        why = left.get(site.found.site.id)
        if why is not None and site.choices:
            proposals = tuple(
                replace(each, candidate=replace(each.candidate, rejections=(*each.candidate.rejections, why)))
                for each in site.proposals
            )
            site = replace(site, proposals=proposals, choices=())
        sites.append(site)
    return replace(priced, problem=priced.frame.problem_of(sites))


def _post(
    group: str, own: Document, compile_: Compile, context: Context, waits: bool
) -> tuple[Verdict, list[int]] | None:
    """Publishes a document; where this rank waits, the verdict on all of them, and in how many groups each rank waits.

    Raises `AgreementError` as `agree`, and `WeaveError`s of the store only where this rank waits.
    """
    timeout_s = context.config.compile_timeout_s
    rounds = topology.rounds(group, timeout_s)
    try:
        number = rounds.publish(own.encode(), own.skeleton, timeout_s)
    except AgreementError:
        if waits:
            raise
        return None  # nothing that this rank does in the group rests on the store
    if not waits:
        return None
    found: tuple[str, ...] | Closed
    found = number if isinstance(number, Closed) else rounds.collect(number, own.skeleton, compile_.guard, timeout_s)
    if isinstance(found, Closed):
        if not isinstance(number, Closed) and found.why is not Why.PAST:
            rounds.settle(number)
        return _closed(group, found, compile_, context), [1]
    documents = [Document.decode(text) for text in found]
    verdict = compare(context.topologies[group].group.ranks, documents)
    if verdict.error:
        assert isinstance(number, int), number
        rounds.settle(number)
        raise AgreementError(f"group {group!r}: {verdict.error}")
    return verdict, [each.groups for each in documents]


def _closed(group: str, closed: Closed, compile_: Compile, context: Context) -> Verdict:
    """Derive the verdict, or raise, after a round in which some ranks did not take part."""
    ranks, own = context.topologies[group].group.ranks, context.topologies[group].group
    peers = listed("rank", closed.peers)
    if closed.why is Why.PAST:
        message = f"{peers} went on without compiling such a graph"
        return Verdict(all_left=Rejection(CODE, message, (("rank", closed.rank),)))
    if closed.why is Why.LATE:
        raise AgreementError(
            f"group {group!r}: {peers} of {ranks} did not come within {context.config.compile_timeout_s:g} s for {WHAT}"
        )
    if closed.why is Why.ENDED:
        raise AgreementError(f"group {group!r}: {peers} of {ranks} ended before {WHAT}")
    guard = f" Dynamo compiled it again after a guard failed: {closed.reason}." if closed.reason else ""
    text = (
        f"group {group!r}: rank {closed.rank} compiled a graph alone whose plan was never agreed on: {peers} of "
        f"{ranks} already called the graph that was compiled before.{guard} Ranks of a group have to compile the same "
        'guards, or switch rewriting off with options={"disable": [...]}'
    )
    if closed.rank == own.ranks[own.rank]:
        topology.rounds(group, context.config.compile_timeout_s).leave_words(text)
        release(group)
    raise AgreementError(text)


def release(group: str) -> None:
    """Gives the group's arenas back: peers that wait in a call end at once, with an error."""
    for fabric in (Fabric.SHM, Fabric.TCP, Fabric.PEER, Fabric.HOST, Fabric.NVSHMEM):
        try:
            transport(fabric).release(group)
        except WeaveError:
            continue


@dataclass
class _Comparisons:
    """Results of earlier comparisons between ranks, for the graphs of one frame."""

    rewritten: weakref.WeakSet[dist.ProcessGroup] = field(default_factory=weakref.WeakSet)
    """Groups that some graph of the frame has rewritten sites of."""
    plans: dict[tuple[str, ...], tuple[Mapping[str, Rejection], tuple[weakref.ref[dist.ProcessGroup], ...]]] = field(
        default_factory=dict
    )
    """Documents before anything was left -> the sites that were left, and the groups that were asked."""

    def rewrote(self, group: str) -> bool:
        return topology.process_group(group) in self.rewritten

    def agreed(self, key: tuple[str, ...], groups: Sequence[str]) -> Mapping[str, Rejection] | None:
        left, known = self.plans.get(key, (None, ()))
        asked = [topology.process_group(group) for group in groups]
        return left if [reference() for reference in known] == asked else None

    def keep(
        self, key: tuple[str, ...], groups: Sequence[str], rewritten: Sequence[str], left: Mapping[str, Rejection]
    ) -> None:
        self.rewritten.update(topology.process_group(group) for group in rewritten)
        self.plans[key] = (dict(left), tuple(weakref.ref(topology.process_group(group)) for group in groups))


_memories = FrameMemory(_Comparisons)
