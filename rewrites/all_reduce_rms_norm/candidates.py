"""The ways to lower a fused all-reduce + norm on each fabric: their estimates, and what speaks against them.

Which of them runs is a function of what all sites of a chain share (see `weaveopt.cost_model.lowerings`), so sites
that hand a token-sharded residual to each other always agree on who holds which rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weaveopt import cost_model
from weaveopt.fabrics.topology import Topology
from weaveopt.ops.all_reduce_norm import call as op
from weaveopt.ops.all_reduce_norm.buffers import RowFormat, buffers_of
from weaveopt.records.candidate import Algorithm, Candidate, Estimate, Fabric, Lowering, Rejection, Scalar, Values
from weaveopt.records.memory import RegionNeed
from weaveopt.records.report import Decision
from weaveopt.records.site import Workload
from weaveopt.rule import ArenaNeed, Context

ROW_ALIGNMENT = 8
"""Elements: GPU kernels move rows in pieces of 16 bytes."""
FP8_ROW_ALIGNMENT = 16
"""Elements of a row in e4m3: bulk copies move 16 bytes, and any form may stand in the run-time table."""
MAX_WORLD = 8
"""Ranks that the GPU kernels join; `kMaxWorld` in csrc/fabric/peer.h."""


def candidates(
    rule: str, workload: Workload, topology: Topology, context: Context, usable_only: bool = False
) -> tuple[Candidate, ...]:
    """Every kernel on every fabric, allowed or rejected, with its estimate at the hint where one can be made.

    With `usable_only` only those that may be chosen.
    """
    found: list[Candidate] = []
    for fabric, unreachable in topology.fabrics():
        if fabric is Fabric.LIBRARY:
            continue
        reasons = [] if unreachable is None else [unreachable]
        if fabric not in context.machine.fabrics:
            values = (("machine", context.machine.name), ("fabric", fabric.value))
            reasons.append(Rejection("fabric_not_on_machine", "the machine's profile has no such fabric", values))
        if fabric not in op.KERNEL_FABRICS:
            message = "this version has no kernel of the rule for the fabric"
            reasons.append(Rejection("no_kernel", message, (("fabric", fabric.value),)))
        if reasons and usable_only:
            continue
        known = cost_model.ways(context.machine, fabric, workload.hidden, workload.world, workload.hosts)
        if fabric in op.GPU_FABRICS and known:
            reasons.extend(_shape_rejections(workload))
            found.extend(_from_table(rule, workload, fabric, known, reasons, context, usable_only))
        else:
            found.extend(_by_threshold(rule, workload, fabric, reasons, context, usable_only))
    return tuple(found)


def quantizes(topology: Topology) -> bool:
    """Whether the kernels between these ranks, if there are any, can hand out e4m3 rows."""
    return topology.device == "cuda"


def against_quantization(hidden: int) -> Rejection | None:
    """Why kernels that could quantize do not take such rows."""
    if hidden % FP8_ROW_ALIGNMENT == 0:
        return None
    message = f"the kernels quantize rows of a multiple of {FP8_ROW_ALIGNMENT} elements"
    return Rejection("row_not_supported", message, (("hidden", hidden),))


def _shape_rejections(workload: Workload) -> list[Rejection]:
    reasons = []
    if workload.hidden % ROW_ALIGNMENT:
        message = f"the kernels take rows of a multiple of {ROW_ALIGNMENT} elements"
        reasons.append(Rejection("row_not_supported", message, (("hidden", workload.hidden),)))
    if workload.world > MAX_WORLD:
        message = f"the kernels join at most {MAX_WORLD} ranks"
        reasons.append(Rejection("world_not_supported", message, (("world", workload.world),)))
    return reasons


def _from_table(
    rule: str,
    workload: Workload,
    fabric: Fabric,
    known: tuple[cost_model.Way, ...],
    reasons: list[Rejection],
    context: Context,
    usable_only: bool,
) -> list[Candidate]:
    """One candidate for each form and algorithm; the run-time table says which of them runs at the hint."""
    table = _table(rule, workload, fabric, context)
    row = next((row for row in table if workload.tokens <= row.max_tokens), None)
    end = table[-1].max_tokens if table else 0
    found: list[Candidate] = []
    for algorithm, form in dict.fromkeys((way.algorithm, way.form) for way in known):
        alike = [way for way in known if (way.algorithm, way.form) == (algorithm, form)]
        able = [way for way in alike if way.reaches(workload.message_bytes)]
        is_chosen = row is not None and (row.algorithm, row.form) == (algorithm, form)
        why = [*reasons, *_against(workload, row, end, is_chosen, able)]
        if why and usable_only:
            continue
        if not able:
            parameters: Values = (("form", form.value),)
            found.append(Candidate(rule, fabric, algorithm, parameters, None, tuple(why), table))
            continue
        if is_chosen and row is not None:
            able = [way for way in able if way.num_ctas == row.num_ctas]
        estimates = [(_estimates(workload, fabric, algorithm, context, way), way) for way in able]
        estimate, best = min(estimates, key=lambda pair: pair[0].best.us)
        parameters = (
            ("form", form.value),
            ("num_ctas", best.num_ctas),
            ("max_tokens", end),
            ("measured", best.measured),
        )
        found.append(Candidate(rule, fabric, algorithm, parameters, estimate.best, tuple(why), table, estimate.whole))
    return found


def _table(rule: str, workload: Workload, fabric: Fabric, context: Context) -> tuple[Lowering, ...]:
    """A graph of one size has one row, and reserves memory for that alone."""
    static = workload.is_static
    table = cost_model.lowerings(
        context.machine,
        fabric,
        workload.hidden,
        workload.dtype,
        workload.world,
        workload.hosts,
        workload.max_tokens,
        min_tokens=workload.tokens if static else max(workload.min_tokens, 1),
        against_library=rule not in context.config.force,
    )
    fitting = [row for row in table if row.max_tokens >= workload.tokens] if static else []
    return (replace(fitting[0], max_tokens=workload.tokens),) if fitting else table


def _against(
    workload: Workload, row: Lowering | None, end: int, is_chosen: bool, able: list[cost_model.Way]
) -> list[Rejection]:
    """Why the table has something else at the hint."""
    reasons = []
    if not able:
        values: tuple[tuple[str, Scalar], ...] = (("bytes", workload.message_bytes),)
        message = "the form was not measured at this size, and is not used there"
        reasons.append(Rejection("beyond_measured", message, values))
    if row is None:
        values = (("tokens", workload.tokens), ("table_ends_at", end))
        message = "the library's all-reduce, then one kernel for addition and norm, is predicted faster at this size"
        reasons.append(Rejection("library_faster", message, values))
    elif not is_chosen:
        message = f"{row.algorithm.value} {row.form.value} is predicted faster at this size"
        reasons.append(Rejection("slower_algorithm", message, (("tokens", workload.tokens),)))
    return reasons


@dataclass(frozen=True)
class _Estimates:
    """Of one candidate: with the sum sharded where it may be; and with the sum whole, where that differs."""

    best: Estimate
    whole: Estimate | None


def _estimates(
    workload: Workload, fabric: Fabric, algorithm: Algorithm, context: Context, way: cost_model.Way | None = None
) -> _Estimates:
    form, num_ctas = (None, None) if way is None else (way.form, way.num_ctas)

    def estimate(sum_sharded: bool) -> Estimate:
        return cost_model.estimate_all_reduce_norm(
            context.machine, workload, fabric, algorithm, sum_sharded, form, num_ctas
        )

    whole = estimate(sum_sharded=False)
    if not workload.sum_may_shard:
        return _Estimates(whole, None)
    best = estimate(sum_sharded=True)
    return _Estimates(best, whole if whole != best else None)


def _by_threshold(
    rule: str, workload: Workload, fabric: Fabric, reasons: list[Rejection], context: Context, usable_only: bool
) -> list[Candidate]:
    """One-shot up to a token count, two-shot above: `shm`, and fabrics without kernels of ours."""
    machine = context.machine
    known = fabric in machine.fabrics
    threshold = 0
    if known:
        threshold = cost_model.one_shot_max_tokens(
            machine, fabric, workload.hidden, workload.dtype, workload.world, workload.hosts
        )
    chosen = Algorithm.ONE_SHOT if workload.tokens <= threshold else Algorithm.TWO_SHOT
    found: list[Candidate] = []
    for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT):
        why = list(reasons)
        if known and algorithm is not chosen:
            values = (("tokens", workload.tokens), ("one_shot_max_tokens", threshold))
            why.append(Rejection("slower_algorithm", f"{chosen.value} is predicted faster at this size", values))
        if why and usable_only:
            continue
        estimates = _estimates(workload, fabric, algorithm, context) if known else None
        best, whole = (None, None) if estimates is None else (estimates.best, estimates.whole)
        parameters = (("one_shot_max_tokens", threshold), ("max_tokens", workload.max_tokens))
        found.append(Candidate(rule, fabric, algorithm, parameters, best, tuple(why), whole=whole))
    return found


def arena_need(decision: Decision) -> ArenaNeed | RegionNeed:
    """What the chosen candidate needs: slots of its own, or regions that all sites of a GPU group share."""
    workload, chosen = decision.site.workload, decision.chosen
    assert workload is not None
    tabled = op.FEATURES[chosen.fabric].tabled
    # On shm the normalized rows may be wider than the activations (fp32 weights): reserve for the widest.
    out_dtype = (workload.out_dtype or workload.dtype) if tabled else "float32"
    rows = RowFormat(workload.hidden, workload.dtype, out_dtype, workload.world)
    table = [op.row_of(row) for row in chosen.lowerings]
    sizes = {b.name: b.num_bytes for b in buffers_of(chosen.fabric, rows, workload.max_tokens, table)}
    if tabled:
        mailboxes, staging, output, partial = (
            sizes.get(name, 0) for name in ("mailboxes", "staging", "output", "partial")
        )
        return RegionNeed(mailboxes // 2, staging, output, partial)
    return ArenaNeed(sizes["partial"] // 2, sizes["output"])
