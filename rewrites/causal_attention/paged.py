"""The splice of `weave::paged_attention` in place of a cache's update and the attention that reads from it.

    cache, keys, values = paged_kv_update(cache, new_keys, new_values, ...)
    out = attention(query, repeat(keys), repeat(values), mask)

becomes `out, cache = paged_attention(cache, query, new_keys, new_values, ...)`, where attention was: all operands are
there, and what reads the cache comes later.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from weaveopt.graph.splice import call_after, current, erase_dead, last_of, replace_uses
from weaveopt.sites.attention.matcher import AttentionNodes
from weaveopt.sites.attention.paged import FUNCTIONAL, PagedNodes

KEPT = (
    "keys", "values", "read_index", "write_index", "cu_seq_lens_q", "cu_seq_lens_k", "first_key", "first_value",
    "sentinel", "max_keys", "window",
)  # fmt: skip
"""Arguments of the update that attention over its rows takes too."""


def paged_call(graph: fx.Graph, nodes: AttentionNodes) -> fx.Node:
    """Insert the call, whose cache later calls read from now on; returns its result [1, heads, queries, head_dim]."""
    form, paged = nodes.form, nodes.paged
    assert paged is not None, f"{form.output.name} reads no paged cache"
    query, sinks = current(form.query), None if form.sinks is None else current(form.sinks)
    named = {name: paged.named(name, 0) for name in KEPT}
    # The cache itself, and how it is a view of what changes.
    named |= {name: value for name, value in paged.update.kwargs.items() if name.startswith("_")}
    named |= {"query": query, "sinks": sinks, "scale": form.scale, "softcap": form.softcap}
    before = [paged.update, *(each for each in (query, sinks) if isinstance(each, fx.Node))]
    op = torch.ops.weave.paged_attention.default
    made = call_after(graph, last_of(graph, before), FUNCTIONAL, (op,), like=form.output, named=named)  # type: ignore[arg-type]
    out = call_after(graph, made, operator.getitem, (made, 0), like=form.output)
    cache = call_after(graph, out, operator.getitem, (made, 1), like=form.output)
    if paged.cache is not None:
        replace_uses(graph, paged.cache, cache)
    return out


def erase_update(graph: fx.Graph, paged: PagedNodes) -> None:
    """The update, once attention is gone: it would write a second time."""
    made = paged.between | {paged.update} | ({paged.cache} if paged.cache is not None else frozenset())
    erase_dead(graph, made)
    assert not paged.update.users, f"{paged.update.name} is still read by {list(paged.update.users)}"
