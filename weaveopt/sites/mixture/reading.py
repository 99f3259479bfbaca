"""Reading the experts of a mixture node by node: what was passed, where a form ends that is not known, small forms."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from weaveopt.graph.pattern import CLAMP, SHAPE_ONLY, Mismatch, describe, is_call, tensor_of
from weaveopt.graph.values import argument, shape_of
from weaveopt.records.candidate import Rejection

aten = torch.ops.aten

BMM = frozenset({aten.bmm.default})
WHERE = frozenset({aten.where.self})
VIEWS = SHAPE_ONLY | {aten.clone.default}
TRANSPOSE = frozenset({aten.permute.default, aten.transpose.int, aten.mT.default})
SUM = frozenset({aten.sum.dim_IntList})
GETITEM = frozenset({operator.getitem})


class Unknown(Exception):
    """Raised at the first node that does not fit a supported form."""

    def __init__(self, node: object, expected: str) -> None:
        name = node.name if isinstance(node, fx.Node) else repr(node)
        self.mismatch = Mismatch(name, expected, describe(node))


class Refused(Exception):
    def __init__(self, why: Rejection) -> None:
        self.why = why


@dataclass
class Reading:
    """Nodes that were read so far."""

    passed: set[fx.Node] = field(default_factory=set)
    masks: list[fx.Node] = field(default_factory=list)

    def through(self, node: object, targets: frozenset[object]) -> fx.Node:
        """The first node, going back, that is none of `targets`."""
        while isinstance(node, fx.Node) and is_call(node, targets):
            self.passed.add(node)
            node = node.args[0]
        return node_of(node, "a tensor")

    def take(self, node: object, targets: frozenset[object], expected: str) -> fx.Node:
        """`node`, which has to be one of `targets`."""
        if not isinstance(node, fx.Node) or not is_call(node, targets):
            raise Unknown(node, expected)
        self.passed.add(node)
        return node


def node_of(node: object, expected: str) -> fx.Node:
    if not isinstance(node, fx.Node):
        raise Unknown(node, expected)
    return node


def value_of(node: fx.Node) -> torch.Tensor:
    value = tensor_of(node)
    assert value is not None, f"{node.name} makes no tensor"
    return value


def read_by_others(node: fx.Node, readers: list[fx.Node]) -> Rejection:
    values = (("node", node.name), ("read_by", ", ".join(sorted({describe(each) for each in readers}))))
    return Rejection("read_by_others", "what the experts make is read by others too", values)


def index_of(gathered: fx.Node) -> object:
    """Return the index by which rows are gathered along the first dimension."""
    if gathered.target is aten.index_select.default:
        return gathered.args[2] if gathered.args[1] == 0 else None
    indices = gathered.args[1]
    return indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None


def swaps_last(node: fx.Node) -> bool:
    if node.target is aten.permute.default:
        return list(node.args[1]) in ([0, 2, 1], [0, -1, -2])  # type: ignore[arg-type]
    dims = [dim % 3 for dim in node.args[1:3] if isinstance(dim, int)]
    return node.target is aten.mT.default or sorted(dims) == [1, 2]


def flat_of(node: object, reading: Reading) -> fx.Node:
    """[tokens, choices] under the view that makes one dimension of it."""
    flat = node_of(node, "a tensor")
    while is_call(flat, SHAPE_ONLY) and value_of(flat).ndim == 1:
        reading.passed.add(flat)
        flat = node_of(flat.args[0], "a tensor")
    return flat


def take_zeros(node: object, reading: Reading) -> None:
    full = reading.take(node, frozenset({aten.full.default, aten.scalar_tensor.default}), "zeros for masked rows")
    if full.args[-1] != 0:
        raise Unknown(full, "zeros for masked rows")


def is_one_a_row(factors: tuple[int, ...], rows: tuple[int, ...]) -> bool:
    """True if factors differ along every dimension of the rows but the last one with more than one element."""
    hidden = next((dim for dim in reversed(range(len(rows))) if rows[dim] != 1), len(rows) - 1)
    return (1,) * (len(rows) - len(factors)) + factors == (*rows[:hidden], 1, *rows[hidden + 1 :])


def take_mask(where: fx.Node, reading: Reading, of_rows: bool) -> None:
    """Reads the mask and the zeros of `where(mask, 0, values)`; `of_rows`: one boolean masks a row of the values."""
    mask = node_of(where.args[0], "a mask")
    if of_rows and not is_one_a_row(shape_of(value_of(mask)), shape_of(value_of(where))):
        raise Unknown(mask, "a mask for each row")
    take_zeros(where.args[1], reading)
    reading.masks.append(mask)


def unmasked(rows: fx.Node, reading: Reading, of_rows: bool) -> fx.Node:
    """`where(mask, 0, rows)` -> rows."""
    while is_call(rows, WHERE):
        reading.passed.add(rows)
        take_mask(rows, reading, of_rows)
        rows_below = rows.args[2]
        rows = node_of(rows_below, "rows")
    return rows


def unclamped(node: object, num_experts: int, reading: Reading) -> fx.Node:
    """Expert ids under clamps that change none of this rank's `num_experts` ids."""
    while isinstance(node, fx.Node) and is_call(node, CLAMP):
        least, most = argument(node, "min"), argument(node, "max")
        if not isinstance(least, int | None) or not isinstance(most, int | None):
            break
        if (least is not None and least > 0) or (most is not None and most < num_experts - 1):
            break
        reading.passed.add(node)
        node = node.args[0]
    return node_of(node, "a tensor")


def cut_as_it_is(ids: fx.Node, reading: Reading) -> fx.Node:
    """`ids`, whose clamps stay in the graph."""
    node = ids
    while is_call(node, CLAMP):
        reading.passed.discard(node)
        node = node_of(node.args[0], "experts")
    return ids


def check_remote_experts(ids: fx.Node, weight: fx.Node, reading: Reading) -> None:
    """Every mask is `ids >= experts`, once for each row; where ids are cut to what is there, there has to be one."""
    num_experts = value_of(weight).shape[0]
    for mask in reading.masks:
        compared = reading.through(mask, SHAPE_ONLY)
        reading.take(compared, frozenset({aten.ge.Scalar}), "a mask of other ranks' experts")
        if unclamped(compared.args[0], num_experts, reading) is not ids or compared.args[1] != num_experts:
            raise Unknown(compared, "a mask of other ranks' experts")
    cut = next((node for node in reading.passed if is_call(node, CLAMP) and node.args[0] is ids), None)
    if cut is not None and not reading.masks:
        raise Unknown(cut, "experts of this rank alone, or a mask of the others")
