"""Predictions of the cost model for a case of the suite `prediction`, and its choice at a site, from the case alone."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.accuracy import CHOICE, SWEPT
from benchmarks.record import Row, Scalar, row
from weaveopt import cost_model
from weaveopt.cost_model import Gemm, Machine
from weaveopt.inductor.calls import COLLECTIVE, MEMORY, CollectiveCall
from weaveopt.inductor.kernels import KernelContext, MemoryTraffic
from weaveopt.ops.reduction.prices.estimate import estimate_fused
from weaveopt.ops.reduction.prices.kernels import kernel_variants
from weaveopt.ops.reduction.prices.table import lowerings
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import KernelRow, parse_variant, variant_name
from weaveopt.records.candidate import LEAVE, Fabric

ITEM_BYTES = 2
HEAD = 128
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Case = Mapping[str, Scalar]


def fabric_of(machine: Machine) -> Fabric:
    return Fabric.PEER if machine.device == "cuda" else Fabric.SHM


def workload_of(case: Case) -> Workload:
    """The site without the time of its GEMM, which writes where the exchange wants its rows."""
    tokens, hidden = int(case["tokens"]), int(case["hidden"])
    gemm = Gemm(tokens, 0, hidden)
    return Workload(tokens, tokens, hidden, "bfloat16", int(case["ranks"]), gemm=gemm, sum_may_shard=True)


def name_of(kernel: KernelRow) -> str:
    """As profiles name it."""
    return variant_name(kernel.algorithm, kernel.transfer, kernel.num_ctas)


def kernel_of(name: str) -> KernelRow:
    """The kernel that `name_of` named, in older result files too: `two_shot mail`, `two_shot bulk 16`."""
    algorithm, transfer, *ctas = name.replace("mail", "ll_packet").split()
    words = [algorithm, transfer, *(f"ctas={word.removeprefix('ctas=')}" for word in ctas)]
    return KernelRow(0, *parse_variant(" ".join(words)))


def named_today(us: Mapping[str, float]) -> dict[str, float]:
    """Times by the names that kernels have today."""
    return {name if name == LEAVE else name_of(kernel_of(name)): each for name, each in us.items()}


def is_candidate(machine: Machine, workload: Workload, kernel: KernelRow) -> bool:
    """True if the model knows the kernel at that size; one with another number of CTAs is read between those known."""
    known = kernel_variants(machine, fabric_of(machine), workload.hidden, workload.world)
    same = [each for each in known if (each.algorithm, each.transfer) == (kernel.algorithm, kernel.transfer)]
    exact = [each for each in same if each.num_ctas == kernel.num_ctas]
    return any(each.covers(workload.message_bytes) for each in exact or same)


def predicted_us(machine: Machine, case: Case) -> float | None:
    """Microseconds; None for what is not predicted from the case (whole layers) or not known to the model."""
    kind = str(case["kind"])
    if kind == "product":
        return cost_model.gemm_us(machine, cost_model.Gemm(int(case["m"]), int(case["k"]), int(case["n"])), "bfloat16")
    if kind == "add_norm":
        tokens, hidden = int(case["tokens"]), int(case["hidden"])
        return cost_model.norm_us(machine, 4 * tokens * hidden * ITEM_BYTES, hidden)
    if kind == "attention":
        return cost_model.attention_us(machine, attention_of(case))
    if kind in COLLECTIVES:
        return cost_model.collective_us(machine, kind, float(case["bytes"]), int(case["ranks"]))
    if kind == LEAVE:
        return left_us(machine, workload_of(case))
    if kind != "fused":
        return None
    workload, kernel = workload_of(case), kernel_of(str(case["kernel"]))
    if not is_candidate(machine, workload, kernel):
        return None
    return estimate_fused(
        machine, workload, fabric_of(machine), kernel.algorithm, True, kernel.transfer, kernel.num_ctas
    ).us


def left_us(machine: Machine, workload: Workload) -> float:
    """A site as Inductor runs it, priced as the nodes of a graph are: the library's all-reduce, then one kernel that
    reads its result and the residual and writes the sum and the normalized rows."""
    message = workload.message_bytes
    surroundings = KernelContext(machine, machine.oversubscription(workload.world, workload.hosts))
    reduced = surroundings.us_of(COLLECTIVE, CollectiveCall("all_reduce", message, workload.world, workload.hosts))
    return reduced + surroundings.us_of(MEMORY, MemoryTraffic(4 * message, 0, workload.hidden))


def attention_of(case: Case) -> cost_model.Attention:
    batch, heads, queries, keys = (int(case[name]) for name in ("batch", "heads", "q", "kv"))
    mask_bytes = 0 if case["causal"] else ITEM_BYTES * batch * queries * keys
    return cost_model.Attention(batch, heads, heads, queries, keys, HEAD, "bfloat16", bool(case["causal"]), mask_bytes)


def chosen(machine: Machine, case: Case) -> str:
    """Name of the kernel that a graph of this one size runs at the site."""
    workload, fabric = workload_of(case), fabric_of(machine)
    rows = lowerings(machine, fabric, workload.hidden, "bfloat16", workload.world, 1, workload.tokens, workload.tokens)
    kernel = next((kernel for kernel in rows if workload.tokens <= kernel.max_tokens), None)
    if kernel is None:
        return LEAVE
    fused = estimate_fused(machine, workload, fabric, kernel.algorithm, True, kernel.transfer, kernel.num_ctas)
    saving_us = left_us(machine, workload) - fused.us
    return name_of(kernel) if saving_us > fused.error_us else LEAVE


def choice_row(machine: Machine, site: Case, us: Mapping[str, float]) -> Row:
    """The chosen candidate's time beside those of all that the model may choose from; `us` holds them by name."""
    workload, us = workload_of(site), named_today(us)
    able = {
        name: each for name, each in us.items() if name == LEAVE or is_candidate(machine, workload, kernel_of(name))
    }
    choice = chosen(machine, site)
    taken_us = able[choice]
    return row(
        case={**site, "kind": CHOICE},
        weave_us=taken_us,
        baselines=able,
        parameters={
            "chosen": choice,
            "of_best": round(min(able.values()) / taken_us, 4),
            "of_leaving": round(able[LEAVE] / taken_us, 4),
        },
    )


def swept_row(machine: Machine, site: Case, us: Mapping[str, float], times: int) -> Row:
    """The chosen candidate beside leaving the site alone, `times` measurements of each; no others were measured.

    Without `of_leaving` where `us` does not hold what the model chooses now.
    """
    choice, us = chosen(machine, site), named_today(us)
    parameters: dict[str, Scalar] = {"chosen": choice, SWEPT: times}
    if choice in us:
        parameters["of_leaving"] = round(us[LEAVE] / us[choice], 4)
    return row(case={**site, "kind": CHOICE}, weave_us=us.get(choice, us[LEAVE]), baselines=us, parameters=parameters)


def predict_again(machine: Machine, rows: list[Row]) -> list[Row]:
    """The same measurements with what the model says now; cases that it does not know any more are left out."""
    found = []
    for each in rows:
        if SWEPT in each.parameters:
            found.append(swept_row(machine, each.case, each.baselines, int(each.parameters[SWEPT])))
            continue
        if each.case["kind"] == CHOICE:
            found.append(choice_row(machine, each.case, each.baselines))
            continue
        guess = predicted_us(machine, each.case)
        if guess is None and each.case["kind"] == "fused":
            continue
        us = each.predicted_us if guess is None else guess
        found.append(
            row(case=each.case, weave_us=each.weave_us, baselines=each.baselines, predicted_us=us,
                parameters=each.parameters)
        )  # fmt: skip
    return found
