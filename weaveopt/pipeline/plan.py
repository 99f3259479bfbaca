"""Step 4: lifetimes -> arena offsets, or regions. The byte count is known before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from weaveopt.records.candidate import LEAVE, Fabric
from weaveopt.records.memory import BufferPlan, Placement, RegionNeed, Slot
from weaveopt.records.report import Decision
from weaveopt.rewrites.all_reduce_rms_norm.aliasing import landed_values
from weaveopt.rewrites.all_reduce_rms_norm.sharding import sharded_values
from weaveopt.rule import ArenaNeed, Finding, Rule

_ALIGNMENT = 4096
"""Slots start on pages, so that no two of them share one (first touch decides where a page lives)."""
_HEADER_BYTES = 64 << 10
_NUM_MAILBOXES = 2
"""Of a GPU arena: `kHeaderBytes` and `kNumMailboxes` in csrc/fabric/peer.h."""


@dataclass(frozen=True)
class _Interval:
    """`bytes` that are live from the `start`-th rewritten site of a group to the `end`-th, both included."""

    owner: str
    bytes: int
    start: int
    end: int


def plan(findings: Sequence[Finding], decisions: Sequence[Decision], rules: Sequence[Rule]) -> tuple[BufferPlan, ...]:
    """One plan for every process group with a rewritten site.

    The operations of one group run one after another on every rank, and a call ends only when its peers have
    read what they need of it or hold a second buffer (see `weaveopt.ops`); so a site's memory is live during
    that site alone, and all sites of a group share the same bytes. On GPUs they share regions whose place is fixed.
    """
    by_name = {rule.name: rule for rule in rules}
    chosen = [(finding, decision.chosen) for finding, decision in zip(findings, decisions, strict=True)]
    sharded = sharded_values([each for each in chosen if each[0].match is not None and each[1].choice != LEAVE])
    by_group: dict[str, list[tuple[Finding, Decision]]] = {}
    for finding, decision in zip(findings, decisions, strict=True):
        if decision.rewritten:
            by_group.setdefault(decision.site.group, []).append((finding, decision))
    return tuple(
        _plan_group(group, rows, {d.site.id: by_name[d.site.rule].need(d) for _, d in rows}, sharded)
        for group, rows in sorted(by_group.items())
    )


def _plan_group(
    group: str,
    rows: list[tuple[Finding, Decision]],
    needs: Mapping[str, ArenaNeed | RegionNeed],
    sharded: frozenset[object],
) -> BufferPlan:
    """The ranks of a group have one kind of device, so its sites need either slots or regions."""
    regions = [need for need in needs.values() if isinstance(need, RegionNeed)]
    slots = {site: need for site, need in needs.items() if isinstance(need, ArenaNeed)}
    assert not (regions and slots), f"group {group} has sites on CPUs ({', '.join(slots)}) and on GPUs"
    if regions:
        return _plan_regions(group, rows, reduce(RegionNeed.union, regions), sharded)
    return _plan_slots(group, rows, slots, sharded)


def _plan_regions(
    group: str, rows: list[tuple[Finding, Decision]], regions: RegionNeed, sharded: frozenset[object]
) -> BufferPlan:
    owners = tuple(decision.site.id for _, decision in rows)
    offset = _HEADER_BYTES
    slots: list[Slot] = []
    mailboxes = _NUM_MAILBOXES * regions.mailbox_bytes
    for size in (mailboxes, regions.staging_bytes, regions.output_bytes, regions.partial_bytes):
        if size:
            slots.append(Slot(offset, size, owners))
        offset += size
    fabrics = {decision.chosen.fabric for _, decision in rows}
    landed = landed_values([(finding, decision.chosen) for finding, decision in rows])
    return BufferPlan(
        group=group,
        bytes=offset,
        slots=tuple(slots),
        placements=tuple(_placement(finding, decision, None, 0, sharded, landed) for finding, decision in rows),
        # What multicast maps, peers reach too.
        fabric=Fabric.MULTIMEM if Fabric.MULTIMEM in fabrics else Fabric.PEER,
        regions=regions,
    )


def _plan_slots(
    group: str, rows: list[tuple[Finding, Decision]], needs: Mapping[str, ArenaNeed], sharded: frozenset[object]
) -> BufferPlan:
    partials = [_Interval(d.site.id, 2 * needs[d.site.id].partial_bytes, i, i) for i, (_, d) in enumerate(rows)]
    outputs = [_Interval(d.site.id, needs[d.site.id].output_bytes, i, i) for i, (_, d) in enumerate(rows)]
    # The two buffers of partial results alternate from call to call, whatever site makes it: one region for all.
    widest = max((interval.bytes for interval in partials), default=0)
    partial_slot = Slot(0, _aligned(widest), tuple(interval.owner for interval in partials))
    output_slots = _place(outputs, base=partial_slot.bytes)
    offsets = {owner: slot.offset for slot in output_slots for owner in slot.owners}
    placements = tuple(
        _placement(finding, decision, partial_slot, offsets[decision.site.id], sharded) for finding, decision in rows
    )
    end = max((slot.offset + slot.bytes for slot in (partial_slot, *output_slots)), default=0)
    return BufferPlan(group=group, bytes=end, slots=(partial_slot, *output_slots), placements=placements)


def _placement(
    finding: Finding,
    decision: Decision,
    partial_slot: Slot | None,
    output_offset: int,
    sharded: frozenset[object],
    landed: frozenset[object] = frozenset(),
) -> Placement:
    workload, match = decision.site.workload, finding.match
    assert workload is not None and match is not None
    return Placement(
        site=decision.site.id,
        partial_offset=partial_slot.offset if partial_slot else 0,
        partial_bytes=partial_slot.bytes // 2 if partial_slot else 0,
        output_offset=output_offset,
        max_tokens=max((row.max_tokens for row in decision.chosen.lowerings), default=workload.max_tokens),
        residual_sharded=match.sharded_input in sharded,
        sum_sharded=match.sharded_output in sharded,
        normed_lands=match.landing_output in landed,
    )


def _place(intervals: Sequence[_Interval], base: int) -> list[Slot]:
    """Offsets such that intervals that are live together never overlap: largest first, lowest offset that is free."""
    placed: list[tuple[_Interval, int]] = []
    for interval in sorted(intervals, key=lambda i: (-i.bytes, i.start)):
        offset = base
        for other, start in sorted(placed, key=lambda pair: pair[1]):
            together = interval.start <= other.end and other.start <= interval.end
            if together and start < offset + _aligned(interval.bytes) and offset < start + _aligned(other.bytes):
                offset = start + _aligned(other.bytes)
        placed.append((interval, offset))
    slots: dict[int, list[_Interval]] = {}
    for interval, offset in placed:
        slots.setdefault(offset, []).append(interval)
    return [
        Slot(
            offset,
            max(_aligned(interval.bytes) for interval in owners),
            tuple(interval.owner for interval in sorted(owners, key=lambda i: i.start)),
        )
        for offset, owners in sorted(slots.items())
    ]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
