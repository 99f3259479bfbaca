"""Matcher of the kind `attention`: what models compute between their query, key and value projections and the output's.

    keys, values = (each[:, :, None].expand(-1, -1, groups, -1, -1).reshape(batch, heads, length, -1) for each in cache)
    bias = where(mask, 0, -inf)
    out = scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale)

A site is the attention, in whatever form the graph holds it (`sites.attention.forms`), and the repetition of keys and
values before it. What the mask means is read (`sites.shared.masks`); it stays in the graph, since many layers share it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.facts import DTYPE_NAMES, module_of
from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.values import shape_of
from weaveopt.records.candidate import Rejection, Values, values_of
from weaveopt.records.site import Site, TokenCounts
from weaveopt.rule import Context, FoundSite
from weaveopt.sites.attention.forms import LAYOUTS, LIBRARY_CALLS, AttentionForm, library_form, unrepeated
from weaveopt.sites.attention.paged import PagedFacts, PagedNodes, paged_read
from weaveopt.sites.attention.written import written_form
from weaveopt.sites.shared.masks import Mask, MaskCache, MaskReading, read_mask

KIND = "attention"
PRODUCT = frozenset({torch.ops.aten.bmm.default})


@dataclass(frozen=True)
class AttentionFacts:
    """The computation of an attention site, equal on every rank; symbolic sizes are replaced by their hints."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    """Positions that the keys have room for."""
    head_dim: int
    value_dim: int
    dtype: str
    operator: str
    """The library's operator that computes it, without namespace; empty for attention that is written out."""
    is_repeated: bool
    """True if the graph materializes keys and values once for every query head."""
    has_mask: bool
    """True if the attention reads a mask tensor."""
    has_booleans: bool
    """True if the graph holds a boolean form of the mask that can be read."""
    mask: Mask | None
    """The mask proven for every query and key; None if it depends on values known only at run time."""
    reads_of_mask: int = 1
    """How many sites of the graph read the same mask."""
    softcap: float = 0.0
    has_sinks: bool = False
    is_written_out: bool = False
    """True if the scores are materialized: attention that the model writes out as GEMMs and a softmax."""
    has_symbols: bool = False
    """True if the number of queries or keys is symbolic."""
    is_square: bool = False
    """True if queries and keys are equally many, for every value of the symbols."""
    paged: PagedFacts | None = None
    """Packed requests over a paged cache, each of which reads its own keys alone; None for attention over tensors."""

    def values(self) -> Values:
        mask = str(self.mask) if self.mask is not None else "read at run time"
        paged = () if self.paged is None else values_of(self.paged)
        return (*values_of(self, "mask", "paged"), ("mask", mask), *paged)


@dataclass(frozen=True)
class AttentionNodes:
    """The nodes of a site by their role."""

    form: AttentionForm
    key: fx.Node
    """[batch, kv_heads, keys, head_dim]: before it was repeated."""
    value: fx.Node
    interior: frozenset[fx.Node]
    """Nodes that a rewrite removes."""
    reading: MaskReading
    paged: PagedNodes | None = None

    @property
    def has_one_query(self) -> bool:
        """True if the graph has a single query for each head, whatever the other sizes are."""
        query = tensor_of(self.form.query)
        return query is not None and isinstance(query.shape[-2], int) and query.shape[-2] == 1


class AttentionMatcher:
    """See the module's docstring."""

    kind = KIND

    def find(self, graph: fx.Graph, context: Context) -> Sequence[FoundSite]:
        forms = list(_forms(graph))
        known = MaskCache()
        readings = [read_mask(form.mask, form.is_causal, *_lengths(form), known) for form in forms]
        readers = Counter(reading.admitted for reading in readings)
        return tuple(
            _found(form, reading, readers[reading.admitted], context)
            for form, reading in zip(forms, readings, strict=True)
        )


def _forms(graph: fx.Graph) -> Iterator[AttentionForm]:
    """Every attention, in the order of the graph."""
    for node in graph.nodes:
        form = None
        if is_call(node, LIBRARY_CALLS):
            form = library_form(node)
        elif is_call(node, PRODUCT):
            form = written_form(node)
        if form is not None:
            yield form


def _lengths(form: AttentionForm) -> tuple[int | torch.SymInt, int | torch.SymInt]:
    query, key = tensor_of(form.query), tensor_of(form.key)
    assert query is not None and key is not None, f"{form.output.name}: operands are no tensors"
    return query.shape[-2], key.shape[-2]


def _found(form: AttentionForm, reading: MaskReading, readers: int, context: Context) -> FoundSite:
    key, repeats_key = unrepeated(form.key, form.nodes)
    value, repeats_value = unrepeated(form.value, form.nodes)
    if key is form.key or value is form.value:
        key, value, repeats_key, repeats_value = form.key, form.value, frozenset(), frozenset()
    interior = form.nodes | repeats_key | repeats_value
    paged = paged_read(form, key, value, interior)
    facts = _facts(form, key, value, reading, readers, paged.facts if isinstance(paged, PagedNodes) else None)
    refused = tuple(each for each in (form.refused, facts) if isinstance(each, Rejection))[:1]
    if refused and isinstance(paged, Rejection):
        refused = (*refused, paged)
    known = facts if isinstance(facts, AttentionFacts) and not refused else None
    query = tensor_of(form.query)
    assert query is not None
    batch, _, queries, _ = (*shape_of(query), 1, 1, 1, 1)[:4]
    most = batch * queries
    if any(not isinstance(size, int) for size in query.shape):
        most = max(most, context.config.max_tokens)
    site = Site(
        id=form.output.name,
        kind=KIND,
        groups=(),
        module=module_of(form.output),
        description=_text(form, key is not form.key, reading, isinstance(paged, PagedNodes)),
        tokens=TokenCounts(batch * queries, most=most),
        facts=() if known is None else known.values(),
        rejections=refused,
    )
    nodes = AttentionNodes(form, key, value, interior, reading, paged if isinstance(paged, PagedNodes) else None)
    return FoundSite(site, interior, known, nodes, form.numbers, _rows_of(form.output))


def _facts(
    form: AttentionForm, key: fx.Node, value: fx.Node, reading: MaskReading, readers: int,
    paged: PagedFacts | None,
) -> AttentionFacts | Rejection:  # fmt: skip
    operands = [tensor_of(node) for node in (form.query, key, value)]
    shapes = [shape_of(operand) for operand in operands if operand is not None]
    if len(shapes) != 3 or any(len(shape) != 4 for shape in shapes):
        return Rejection("shape_not_known", "queries, keys and values are not [batch, heads, length, head_dim]")
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _), (*_, value_dim) = shapes
    if shapes[2][:3] != (batch, kv_heads, keys) or shapes[1][0] != batch:
        return Rejection("shape_not_known", "keys and values differ in sequences, heads or length")
    query = operands[0]
    assert query is not None
    if query.dtype not in DTYPE_NAMES:
        values = (("dtype", str(query.dtype).removeprefix("torch.")),)
        return Rejection("dtype_not_supported", "the kernels support bfloat16, float16 and float32", values)
    if any(operand is None or operand.dtype != query.dtype for operand in operands):
        return Rejection("dtype_not_supported", "queries, keys and values differ in dtype")
    if kv_heads == 0 or heads % kv_heads:
        counts = (("heads", heads), ("kv_heads", kv_heads))
        return Rejection("heads_not_grouped", "query heads are no multiple of key heads", counts)
    if reading.mask is None and reading.admitted is None and paged is None:
        return reading.reason or Rejection("mask_not_known", "the mask could not be read")
    lengths = [size for operand in operands if operand is not None for size in operand.shape[-2:-1]]
    return AttentionFacts(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=DTYPE_NAMES[query.dtype],
        operator="" if form.call is None else str(form.call.target).split(".")[1],
        is_repeated=key is not form.key,
        has_mask=form.mask is not None,
        has_booleans=reading.admitted is not None,
        mask=reading.mask,
        reads_of_mask=readers,
        softcap=form.softcap,
        has_sinks=form.sinks is not None,
        is_written_out=form.call is None,
        has_symbols=any(not isinstance(size, int) for size in lengths),
        is_square=str(lengths[0]) == str(lengths[1]),
        paged=paged,
    )


def _text(form: AttentionForm, is_repeated: bool, reading: MaskReading, is_paged: bool) -> str:
    scores = f"q @ {'repeat(k)' if is_repeated else 'k'}^T * {form.scale:.6g}"
    if form.softcap:
        scores = f"softcap({scores}, {form.softcap:g})"
    if form.is_causal or form.mask is not None:
        unread = "each request's own keys" if is_paged else "read at run time"
        scores += f" + mask ({unread if reading.mask is None else reading.mask})"
    sinks = ", sinks" if form.sinks is not None else ""
    return f"softmax({scores}{sinks}) @ {'repeat(v)' if is_repeated else 'v'}"


def _rows_of(output: fx.Node) -> fx.Node | None:
    """Return the result as rows `[..., heads * value_dim]`, the operand of the output projection."""
    value = tensor_of(output)
    assert value is not None
    width = shape_of(value)[1] * shape_of(value)[3]
    node = output
    for _ in range(4):
        users = [user for user in node.users if is_call(user, LAYOUTS)]
        if len(users) != 1:
            return None
        node = users[0]
        rows = tensor_of(node)
        if rows is not None and rows.ndim in (2, 3) and shape_of(rows)[-1] == width:
            return node if math.prod(shape_of(rows)[:-1]) == shape_of(value)[0] * shape_of(value)[2] else None
    return None
