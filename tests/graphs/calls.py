"""Readers of rewritten graphs: operators by name, and the decoded constants of the rule's own calls."""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from weaveopt.ops.reduction.buffers import RowFormat, buffers_of
from weaveopt.ops.reduction.call import ReductionCall, SumOut, decode
from weaveopt.ops.reduction.variant import KernelRow
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import MemoryPlan


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def calls(graph: fx.Graph) -> list[ReductionCall]:
    return [decode(str(node.args[-1])) for node in graph.nodes if "weave." in str(node.target)]


def sharded(graph: fx.Graph) -> list[tuple[bool, bool]]:
    """(residual comes sharded, sum goes out sharded) of each call."""
    return [(call.residual_sharded, call.sum_out is SumOut.SHARDED) for call in calls(graph)]


def sizes(plan: MemoryPlan) -> dict[str, int]:
    """Bytes of the plan's buffers by name."""
    return {buffer.name: buffer.num_bytes for buffer in plan.buffers}


def needed(rows: RowFormat, table: Iterable[KernelRow], fabric: Fabric = Fabric.PEER) -> dict[str, int]:
    """Bytes by name that each kernel of a table needs alone, and the most of them."""
    most: dict[str, int] = {}
    for row in table:
        for buffer in buffers_of(fabric, rows, row.max_tokens, (row,)):
            most[buffer.name] = max(buffer.num_bytes, most.get(buffer.name, 0))
    return {name: num_bytes for name, num_bytes in most.items() if num_bytes}
