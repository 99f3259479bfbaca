"""Arrangements: views and pieces that come out even, those that do not, and sizes that are symbols."""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from weaveopt.graph.arrangement import Arrangement, Factor, joined, merged, quotient, taken
from weaveopt.graph.moves import Moves
from weaveopt.records.candidate import Rejection

aten = torch.ops.aten


def test_a_view_that_is_undone_is_none() -> None:
    whole = Arrangement.of((6, 4))
    viewed = whole.viewed((3, 2, 2, 2))
    assert viewed is not None and viewed.dims[1] == (Factor(0, 1, 2),)
    assert viewed.viewed((6, 4)) == whole and whole.viewed((12, 2, 1)) is not None
    assert whole.viewed((5, 5)) is None and whole.viewed((6, 3)) is None and whole.viewed((6, 4, 2)) is None


def test_digits_in_another_order_stay_apart() -> None:
    turned = Arrangement.of((2, 3)).permuted((1, 0))
    flat = turned.viewed((6,))
    assert flat is not None and flat.factors == (Factor(1, 1, 3), Factor(0, 1, 2))
    # A cut across the two digits is no movement of whole digits.
    assert flat.viewed((2, 3)) is None and flat.viewed((3, 2)) == turned
    assert merged((Factor(0, 6, 4), Factor(0, 2, 3))) == (Factor(0, 2, 12),)
    assert len(merged((Factor(0, 6, 4), Factor(1, 2, 3)))) == 2


def test_pieces_join_in_their_order_alone() -> None:
    whole = Arrangement.of((6, 4))
    pieces = [piece for index in range(3) if (piece := whole.piece(0, 3, index)) is not None]
    assert joined(pieces, 0) == whole and joined(pieces[:1], 0) == pieces[0]
    moved = joined(pieces, 1)
    assert moved is not None and moved.dims == ((Factor(0, 1, 2),), (Factor(0, 2, 3), Factor(1, 1, 4)))
    for wrong in (pieces[::-1], pieces[:2], [pieces[0]] * 3, [*pieces[:2], Arrangement.of((2, 4))]):
        assert joined(wrong, 0) is None
    assert whole.piece(0, 4, 0) is None


def test_pieces_of_pieces() -> None:
    whole = Arrangement.of((4, 6))
    halves = [half for index in range(2) if (half := whole.piece(0, 2, index)) is not None]
    columns = [[column for at in range(3) if (column := half.piece(1, 3, at)) is not None] for half in halves]
    rows = [joined(each, 1) for each in columns]
    assert rows == halves
    across = [joined([columns[0][at], columns[1][at]], 0) for at in range(3)]
    assert joined([each for each in across if each is not None], 1) == whole
    assert joined([columns[0][0], columns[1][1]], 0) is None


def test_symbols_divide_where_they_always_do() -> None:
    rows = sympy.Symbol("s0", positive=True, integer=True)
    assert quotient(2 * rows, rows) == 2 and quotient(2 * rows, 2) == rows
    assert quotient(rows, 2) is None and quotient(rows + 1, rows) is None and quotient(7, 2) is None
    dim = (Factor(0, 1, 6 * rows),)
    assert taken(dim, 2) == ((Factor(0, 3 * rows, 2),), (Factor(0, 1, 3 * rows),))
    assert taken(dim, rows) == ((Factor(0, 6, rows),), (Factor(0, 1, 6),)) and taken(dim, 4) is None


def test_what_is_no_movement_of_whole_digits_says_so() -> None:
    """Steps of slices, other sizes of elements, parts joined with other values; what does not read the
    source is None."""
    graph = fx.Graph()
    source, other = graph.placeholder("source"), graph.placeholder("other")
    source.meta["val"] = other.meta["val"] = torch.empty(8, 4, dtype=torch.bfloat16)

    def call(target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = target(*fx.map_arg(args, lambda each: each.meta["val"]))  # type: ignore[operator]
        return node

    moves = Moves({source: Arrangement.of((8, 4))})
    lost = {
        "every second": call(aten.slice.Tensor, source, 0, 0, 8, 2),
        "bytes": call(aten.view.dtype, source, torch.uint8),
        "other numbers": call(aten.view.dtype, source, torch.float16),
        "uneven": call(aten.split.Tensor, source, 3),
        "with another": call(aten.cat.default, [source, other]),
        "padded": call(aten.constant_pad_nd.default, source, [0, 0, 0, 1]),
        "repeated": call(aten.expand.default, call(aten.unsqueeze.default, source, 0), [2, 8, 4]),
    }
    found = {name: moves.of(node) for name, node in lost.items()}
    codes = {name: each.code for name, each in found.items() if isinstance(each, Rejection)}
    uneven = dict.fromkeys(("every second", "uneven", "padded"), "uneven_shards")
    assert codes == dict.fromkeys(found, "form_not_known") | uneven
    assert moves.of(call(aten.t.default, other)) is None and moves.of(call(aten.neg.default, source)) is None
    last = call(aten.slice.Tensor, source, 0, -4, 8)
    assert moves.of(last) == Arrangement.of((8, 4)).piece(0, 2, 1)
    same = call(aten.view.dtype, call(aten.expand.default, source, [8, 4]), torch.int16)
    assert moves.of(same) == Arrangement.of((8, 4))
