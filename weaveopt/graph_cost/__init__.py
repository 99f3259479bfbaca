"""Predicted time of what a graph runs outside its sites: which kernels Inductor makes of it, and what each takes.

values     sizes of fake tensors, layouts, arguments by name
calls      operations that run as a library's kernel: products, attention, collectives, sorts
lowered    every node inlined into the loops of those that read it, or stored (Inductor's lowering)
fused      loops over the same elements joined into one kernel (Inductor's scheduler)
work       the walk over a graph, without its sites
"""

from weaveopt.graph_cost.work import work_of

__all__ = ["work_of"]
