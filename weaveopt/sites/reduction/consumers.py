"""Consumers of the normalized rows of a site: GEMMs that read them by rows, directly or through views, and all others.

q, k, v = rows @ wq, rows @ wk, rows @ wv
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from weaveopt.graph.pattern import SHAPE_ONLY, is_call, tensor_of
from weaveopt.graph.values import hint
from weaveopt.sites.shared.linear import MatchedGemm, gemm_at


@dataclass(frozen=True)
class Readers:
    """Consumers of rows `[..., hidden]`."""

    gemms: tuple[MatchedGemm, ...]
    """GEMMs that read the rows as `a [tokens, hidden]`, in graph order."""
    others: tuple[fx.Node, ...]
    """Other consumers, in graph order."""
    views: tuple[fx.Node, ...]
    """Views between the rows and their consumers."""

    @property
    def nodes(self) -> frozenset[fx.Node]:
        """Nodes that a rewrite including the GEMMs replaces; empty if the rows have other consumers too."""
        return frozenset() if self.others else frozenset((*self.views, *(gemm.node for gemm in self.gemms)))


def readers_of(rows: fx.Node) -> Readers:
    """Collect the consumers of the value `rows` and of its views."""
    hidden = _length(rows)
    gemms: dict[fx.Node, MatchedGemm] = {}
    others: dict[fx.Node, None] = {}
    views: dict[fx.Node, None] = {}
    pending = [rows]
    while pending:
        here = pending.pop()
        for user in here.users:
            if is_call(user, SHAPE_ONLY):
                views[user] = None
                pending.append(user)
                continue
            gemm = gemm_at(user)
            as_rows = gemm is not None and gemm.a is here and user.all_input_nodes.count(here) == 1
            if gemm is not None and as_rows and _length(here) == hidden and _reads_once(gemm, here):
                gemms[user] = gemm
            else:
                others[user] = None
    return Readers(tuple(gemms[each] for each in sorted(gemms)), tuple(sorted(others)), tuple(sorted(views)))


def _reads_once(gemm: MatchedGemm, rows: fx.Node) -> bool:
    return rows not in (gemm.b, gemm.bias, gemm.addend)


def _length(rows: fx.Node) -> int:
    value = tensor_of(rows)
    return 0 if value is None or value.ndim == 0 else hint(value.shape[-1])
