"""Attention over a paged cache: which write made its keys and values, and what transformers' mask of it stands for.

    cache, keys, values = paged_kv_update(cache, new_keys, new_values, ..., mask, cu_seq_lens_q, cu_seq_lens_k, window)
    out = attention(query, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], mask)

`paged_kv_update` names the mask of the layer's cache, so that nothing is taken from its values: the site is known where
attention reads that very tensor. Where nothing is read from the cache, attention takes the new keys and values alone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.values import shape_of
from weaveopt.records.candidate import Rejection
from weaveopt.sites.attention.forms import AttentionForm, same_size

aten = torch.ops.aten
FUNCTIONAL = torch.ops.higher_order.auto_functionalized_v2
"""An operator that changes arguments, as AOTAutograd writes it: results, then the arguments after the change."""
_RESULTS = 2
_PERMUTE, _UNSQUEEZE = frozenset({aten.permute.default}), frozenset({aten.unsqueeze.default})
_SQUEEZE = frozenset({aten.squeeze.dim})
_ITEM = frozenset({operator.getitem})


@dataclass(frozen=True)
class PagedFacts:
    """Equal on every rank; hints of symbolic sizes."""

    requests: int
    """Requests that the lengths have room for; some may be empty."""
    window: int
    """How many keys a query reads at most, with its own; 0: all of its request before it."""
    reads_cache: bool
    """False: attention takes the new keys and values alone."""


@dataclass(frozen=True)
class PagedNodes:
    """The write that a site reads from, and what only the two of them use."""

    facts: PagedFacts
    update: fx.Node
    """`auto_functionalized_v2(paged_kv_update, ...)`"""
    cache: fx.Node | None
    """The cache after the write; None where nothing reads it."""
    between: frozenset[fx.Node]
    """Nodes from the write to the site."""

    def named(self, name: str, default: object = None) -> object:
        """An argument of the write."""
        return self.update.kwargs.get(name, default)


def paged_read(
    form: AttentionForm, key: fx.Node, value: fx.Node, interior: frozenset[fx.Node]
) -> PagedNodes | Rejection | None:
    """The write that keys and values come from; None where they come from none, else why the site is not known."""
    update = _read_of(key, 0)
    reads = update is not None
    if update is None:
        update = _written(key, "keys")
    if update is None:
        return None
    if update is not (_read_of(value, 1) if reads else _written(value, "values")):
        return Rejection("not_the_layers_rows", "keys and values come from different writes to the cache")
    mask, lengths_q, lengths_k = (update.kwargs.get(name) for name in ("mask", "cu_seq_lens_q", "cu_seq_lens_k"))
    if not all(isinstance(each, fx.Node) for each in (mask, lengths_q, lengths_k)):
        return Rejection("lengths_not_known", "the write to the cache names no mask with its lengths")
    assert isinstance(mask, fx.Node) and isinstance(lengths_q, fx.Node)
    if form.mask is None or form.is_causal or not _is_same(form.mask, mask):
        message = "attention reads another mask than the one that was made for the layer's cache"
        return Rejection("not_the_layers_mask", message)
    query, rows, bounds = tensor_of(form.query), tensor_of(key), tensor_of(lengths_q)
    if query is None or rows is None or bounds is None or query.shape[0] != 1 or rows.shape[-1] != query.shape[-1]:
        return Rejection("shape_not_known", "queries are not packed in one row, or head sizes differ")
    between = _between(update, interior)
    if between is None:
        return Rejection("rows_are_read", "rows that are read from the cache have other readers too")
    results = {user.args[1]: user for user in update.users}
    window = update.kwargs.get("window", 0)
    assert isinstance(window, int), window
    facts = PagedFacts(max(shape_of(bounds)[0] - 1, 1), window, reads)
    return PagedNodes(facts, update, results.get(_RESULTS), between)


def _is_update(node: object) -> bool:
    if not isinstance(node, fx.Node) or not is_call(node, frozenset({FUNCTIONAL})):
        return False
    return node.args[0] is torch.ops.weave.paged_kv_update.default


def _read_of(node: fx.Node, result: int) -> fx.Node | None:
    """The write under `getitem(update, result).permute(1, 0, 2).unsqueeze(0)`."""
    turned = node.args[0] if is_call(node, _UNSQUEEZE) and node.args[1] == 0 else None
    if not isinstance(turned, fx.Node) or not is_call(turned, _PERMUTE) or turned.args[1] != [1, 0, 2]:
        return None
    item = turned.args[0]
    if not isinstance(item, fx.Node) or not is_call(item, _ITEM) or item.args[1] != result:
        return None
    update = item.args[0]
    return update if isinstance(update, fx.Node) and _is_update(update) else None


def _written(node: fx.Node, name: str) -> fx.Node | None:
    """The write that stores `node.squeeze(0).permute(1, 0, 2)` and reads nothing."""
    for flat in node.users:
        for turned in flat.users if is_call(flat, _SQUEEZE) and flat.args[1] == 0 else ():
            for update in turned.users if is_call(turned, _PERMUTE) and turned.args[1] == [1, 0, 2] else ():
                if _is_update(update) and update.kwargs[name] is turned:
                    index = update.kwargs["read_index"]
                    read = tensor_of(index) if isinstance(index, fx.Node) else None
                    return update if read is not None and same_size(read.shape[0], 0) else None
    return None


def _is_same(node: fx.Node, mask: fx.Node) -> bool:
    """True if `node` is `mask`, broadcast to all heads, or padded for a kernel and cut to its length again."""
    wanted, found = tensor_of(mask), tensor_of(node)
    if wanted is None or found is None or wanted.ndim != 4 or found.ndim != 4:
        return False
    if not all(same_size(x, y) for x, y in zip(found.shape[2:], wanted.shape[2:], strict=True)):
        return False
    while node is not mask:
        before = node.args[0] if node.args else None
        pads = is_call(node, frozenset({aten.constant_pad_nd.default})) and _pads_end(node)
        cuts = is_call(node, frozenset({aten.slice.Tensor})) and node.args[1] in (3, -1) and node.args[2] in (0, None)
        if not isinstance(before, fx.Node) or not (pads or cuts or is_call(node, frozenset({aten.expand.default}))):
            return False
        node = before
    return True


def _pads_end(node: fx.Node) -> bool:
    padding = node.args[1]
    return isinstance(padding, list | tuple) and len(padding) == 2 and isinstance(padding[0], int) and padding[0] == 0


def _between(update: fx.Node, interior: frozenset[fx.Node]) -> frozenset[fx.Node] | None:
    """Results of the write and what becomes of them up to the site; None if others read them too."""
    found: set[fx.Node] = set()
    pending = [user for user in update.users if is_call(user, _ITEM) and user.args[1] != _RESULTS]
    while pending:
        node = pending.pop()
        found.add(node)
        for user in node.users:
            if user in interior:
                continue
            if not is_call(user, _PERMUTE | _UNSQUEEZE):
                return None
            pending.append(user)
    return frozenset(found)
