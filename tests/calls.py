"""What rewritten graphs call: operators by name, and the constants of the rule's own."""

from __future__ import annotations

import torch.fx as fx

from weaveopt.ops.all_reduce_norm.call import AllReduceNormCall, SumOut, decode
from weaveopt.records.memory import MemoryPlan, RegionNeed


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def calls(graph: fx.Graph) -> list[AllReduceNormCall]:
    return [decode(str(node.args[-1])) for node in graph.nodes if "weave." in str(node.target)]


def sharded(graph: fx.Graph) -> list[tuple[bool, bool]]:
    """(residual comes sharded, sum goes out sharded) of each call."""
    return [(call.residual_sharded, call.sum_out is SumOut.SHARDED) for call in calls(graph)]


def regions(plan: MemoryPlan) -> RegionNeed:
    """The buffers of a GPU arena as the kernels' need of regions; one mailbox of two."""
    sizes = {buffer.name: buffer.num_bytes for buffer in plan.buffers}
    mailboxes, *others = (sizes.pop(name, 0) for name in ("mailboxes", "staging", "output", "partial"))
    assert not sizes, f"{sizes} is none of the kernels' regions"
    return RegionNeed(mailboxes // 2, *others)
