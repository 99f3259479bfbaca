"""Follow a reduced value from its all-reduce or reduce-scatter to the norm that ends the site, or as far as it goes.

    wait(all_reduce(partial)) [+ bias] [* scale] [-> post norm] [+ residual] [+ another all-reduce] [-> norm]

in any of the orders that models write it, over views. The walk goes on while a value has one reader, so that
nothing it passes is needed elsewhere. Where it cannot go on the site ends, without a norm, and says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from weaveopt.graph.pattern import ADD, MUL, SHAPE_ONLY, describe, is_call, skip_shapes, tensor_of
from weaveopt.graph.scalars import number_of
from weaveopt.records.candidate import Rejection
from weaveopt.sites.shared.norms import Norm, tensor_eps

_c10d = torch.ops._c10d_functional
ALL_REDUCE = frozenset({_c10d.all_reduce.default})
REDUCE_SCATTER = frozenset({_c10d.reduce_scatter_tensor.default})
ANY_ALL_REDUCE = frozenset(
    {
        _c10d.all_reduce.default,
        _c10d.all_reduce_.default,
        _c10d.all_reduce_coalesced.default,
        _c10d.all_reduce_coalesced_.default,
    }
)
WAIT = frozenset({_c10d.wait_tensor.default})


@dataclass(frozen=True)
class Reduced:
    """Epilogue of one or more all-reduces that are added into one sum."""

    collectives: tuple[fx.Node, ...]
    biases: tuple[fx.Node, ...]
    """Vectors [hidden] that are added after the reduction, before the scale."""
    scale: float
    scales: tuple[fx.Node | float | int, ...]
    """Factors of `scale`: numbers, or Python floats that were lifted to tensors."""
    scale_tensor: fx.Node | None
    post: Norm | None
    residuals: tuple[fx.Node, ...]
    """Values of the sum's shape that are added and were not reduced here: none, the residual, seldom two."""
    total: fx.Node
    """The sum (the reduced value itself, where there is no residual)."""
    norm: Norm | None
    passed: frozenset[fx.Node]
    """Nodes from the collectives up to and including `total`; those before `total` have no other consumers."""
    without_norm: Rejection | None = None
    """Why no norm is part of the site; None where one is, or where a post-norm family ends."""

    @property
    def partials(self) -> tuple[fx.Node, ...]:
        return tuple(node.args[0] for node in self.collectives if isinstance(node.args[0], fx.Node))

    @property
    def scalars(self) -> tuple[fx.Node | float | int, ...]:
        """Scalars that the rewrite takes as the numbers that they are in this call."""
        return (*self.scales, *(norm.eps for norm in (self.post, self.norm) if norm is not None))

    @property
    def text(self) -> str:
        """The computation in words of torch, for the report."""
        words = " + ".join(f"{_word(each)}(partial)" for each in self.collectives)
        words += " + bias" * len(self.biases)
        if self.scale_tensor is not None or self.scale != 1.0:
            words = f"({words}) * scale"
        if self.post is not None:
            words += f" -> {self.post.text}"
        words += " + residual" * len(self.residuals)
        return words + (f" -> {self.norm.text}" if self.norm is not None else "")

    @property
    def own_text(self) -> str:
        """The reason why no norm follows: it names nodes that other ranks may not have."""
        return "" if self.without_norm is None else f"; no norm: {self.without_norm.text}"

    @property
    def total_is_read(self) -> bool:
        """True if the sum has a consumer other than the site's norm."""
        own = set(self.norm.nodes) if self.norm is not None else set()
        if any(user not in own for user in self.total.users):
            return True
        # A statistic of the norm that is read elsewhere (saved for the backward pass) is computed from the sum again.
        return any(user not in own for node in own if node is not self.norm.output for user in node.users)  # type: ignore[union-attr]


def _word(collective: fx.Node) -> str:
    return "reduce_scatter" if is_call(collective, REDUCE_SCATTER) else "all_reduce"


@dataclass
class _Walk:
    """The state of one walk; `reader` is the only reader of `value`, or None."""

    value: fx.Node
    hidden: int
    collectives: list[fx.Node]
    passed: set[fx.Node]
    biases: list[fx.Node] = field(default_factory=list)
    scale: float = 1.0
    scales: list[fx.Node | float | int] = field(default_factory=list)
    scale_tensor: fx.Node | None = None
    post: Norm | None = None
    residuals: list[fx.Node] = field(default_factory=list)
    views: list[fx.Node] = field(default_factory=list)
    """Views after the last computation, preceded by the operand of the first of them."""

    @property
    def linear(self) -> bool:
        """True if the value is still a plain sum of reduced values, biases and residuals."""
        return self.post is None and self.scale == 1.0 and self.scale_tensor is None

    def step_to(self, node: fx.Node) -> None:
        self.views.clear()
        self.passed.add(node)
        self.value = node

    def step_to_view(self, node: fx.Node) -> None:
        before = self.views or [self.value]
        self.step_to(node)
        self.views = [*before, node]

    def step_back(self) -> None:
        """Step back before the last views: they stay in the graph if a site ends without a norm."""
        if self.views:
            self.value, *downstream = self.views
            self.passed.difference_update(downstream)
            self.views.clear()

    def refuse(self, code: str, message: str, node: fx.Node) -> Rejection:
        return Rejection(code, message, (("node", node.name), ("op", describe(node))))


def follow(
    collective: fx.Node,
    norms: Mapping[fx.Node, list[Norm]],
    downstream: Sequence[fx.Node] = (),
    may_be_saved: bool = False,
) -> Reduced | Rejection:
    """Follow the site that starts at `collective`, or return why there is none; `downstream`: nodes already part of it.

    With `may_be_saved` intermediate values may also be graph outputs.
    """
    started = _start(collective)
    if isinstance(started, Rejection):
        return started
    walk = started
    for node in downstream:
        walk.step_to(node)
    stopped: Rejection | None = None
    while True:
        here = norms.get(walk.value, [])
        if here:
            if _pass_post_norm(walk, here[0]):
                continue
            return _ended(walk, here[0])
        readers = [user for user in walk.value.users if not (may_be_saved and user.op == "output")]
        if len(readers) != 1:
            break
        reader = readers[0]
        moved = _pass(walk, reader)
        if isinstance(moved, Rejection):
            stopped = moved
            break
        if not moved:
            break
    if walk.post is not None and walk.residuals and stopped is None:
        return _ended(walk, None)
    why = stopped or _why_no_norm(walk)
    walk.step_back()
    return _ended(walk, None, why)


def _why_no_norm(walk: _Walk) -> Rejection:
    eps = tensor_eps(walk.value)
    if eps is not None:
        return walk.refuse(
            "eps_not_known", "the norm's eps is a tensor: no value is known as the graph is compiled", eps
        )
    readers = ", ".join(sorted({describe(user) for user in walk.value.users})) or "nothing"
    code = "read_by_several" if len(walk.value.users) > 1 else "no_norm_follows"
    message = "none over the hidden dimension follows"
    return Rejection(code, message, (("node", walk.value.name), ("read_by", readers)))


def _start(all_reduce: fx.Node) -> _Walk | Rejection:
    if not is_call(all_reduce, ALL_REDUCE | REDUCE_SCATTER):
        return Rejection(
            "form_not_known",
            "only functional, single-tensor all-reduces are rewritten",
            (("op", describe(all_reduce)),),
        )
    if all_reduce.args[1] != "sum" and not (is_call(all_reduce, REDUCE_SCATTER) and all_reduce.args[1] == "avg"):
        return Rejection(
            "not_a_sum", "only sums are reduced in the fused kernel", (("reduce_op", str(all_reduce.args[1])),)
        )
    value = tensor_of(all_reduce)
    if value is None or value.ndim < 2 or not isinstance(value.shape[-1], int):
        shape = "unknown" if value is None else str(tuple(value.shape))
        return Rejection("shape_not_known", "a site needs [..., hidden] with a static hidden size", (("shape", shape),))
    wait = _only_wait(all_reduce)
    if wait is None:
        return Rejection(
            "read_by_several",
            "the collective is not waited for exactly once",
            (("num_readers", len(all_reduce.users)),),
        )
    return _Walk(wait, value.shape[-1], [all_reduce], {all_reduce, wait})


def _only_wait(all_reduce: fx.Node) -> fx.Node | None:
    users = list(all_reduce.users)
    return users[0] if len(users) == 1 and is_call(users[0], WAIT) else None


def _pass(walk: _Walk, reader: fx.Node) -> bool | Rejection:
    """Step over `reader` if it belongs to the site."""
    if is_call(reader, SHAPE_ONLY):
        shape = tensor_of(reader)
        if shape is None or shape.ndim < 2 or shape.shape[-1] != walk.hidden:
            return walk.refuse("hidden_is_split", "a view splits the hidden dimension before the norm", reader)
        walk.step_to_view(reader)
        return True
    if is_call(reader, MUL):
        return _pass_scale(walk, reader)
    if is_call(reader, ADD):
        return _pass_add(walk, reader)
    return False


def _other_operand(walk: _Walk, reader: fx.Node) -> fx.Node | float | None:
    others = [argument for argument in reader.args[:2] if argument is not walk.value]
    if len(others) == 1 and isinstance(others[0], fx.Node | float | int) and not reader.kwargs:
        return others[0]
    return None


def _pass_scale(walk: _Walk, reader: fx.Node) -> bool | Rejection:
    if walk.residuals or walk.post is not None or walk.scale_tensor is not None:
        return False
    other = _other_operand(walk, reader)
    number = number_of(other)
    if other is not None and number is not None:
        walk.scale *= number
        walk.scales.append(other)
    elif isinstance(other, fx.Node):
        value, scaled = tensor_of(other), tensor_of(walk.value)
        if value is None or scaled is None or value.ndim != 0:
            return False
        if value.device != scaled.device:
            return walk.refuse("device_changes", "the scale is a tensor on another device", reader)
        walk.scale_tensor = other
    else:
        return False
    if tensor_of(reader) is None or _dtype(reader) != _dtype(walk.value):
        return walk.refuse("dtype_changes", "the scale changes the dtype of the reduced value", reader)
    walk.step_to(reader)
    return True


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = tensor_of(node)
    return None if value is None else value.dtype


def _pass_add(walk: _Walk, reader: fx.Node) -> bool | Rejection:
    other = _other_operand(walk, reader)
    value, before = tensor_of(reader), tensor_of(walk.value)
    if not isinstance(other, fx.Node) or value is None or before is None:
        return walk.refuse("form_not_known", "an addition of this form is not part of any site", reader)
    if value.dtype != before.dtype or value.shape != before.shape or _dtype(other) != before.dtype:
        return walk.refuse("dtype_changes", "the addition changes the dtype or shape of the reduced value", reader)
    operand = tensor_of(other)
    partner = _reduced_by(other, walk) if operand is not None and operand.shape == before.shape else None
    if partner is not None:
        walk.collectives.append(partner.nodes[0])
        walk.passed.update(partner.nodes)
        walk.biases.extend(partner.biases)
    elif _is_vector(other, walk.hidden):
        if not walk.linear:
            return walk.refuse("form_not_known", "a bias is added after the scale or the norm", reader)
        walk.biases.append(other)
    elif operand is None or operand.shape != before.shape:
        return walk.refuse("form_not_known", "what is added has another shape than the reduced value", reader)
    else:
        walk.residuals.append(other)
    walk.step_to(reader)
    return True


def _is_vector(node: fx.Node, hidden: int) -> bool:
    value = tensor_of(node)
    return value is not None and value.ndim == 1 and value.shape[0] == hidden


@dataclass(frozen=True)
class _Partner:
    """Another all-reduce of the group whose result, after views and biases, is added to the sum."""

    nodes: tuple[fx.Node, ...]
    biases: tuple[fx.Node, ...]


def _reduced_by(other: fx.Node, walk: _Walk) -> _Partner | None:
    """Return the chain from another all-reduce of the same group to `other`, if this sum is its only consumer."""
    if not walk.linear:
        return None
    chain = [other]
    biases: list[fx.Node] = []
    while True:
        here = chain[-1]
        if is_call(here, ADD) and not here.kwargs:
            vectors = [a for a in here.args[:2] if isinstance(a, fx.Node) and _is_vector(a, walk.hidden)]
            rest = [a for a in here.args[:2] if a not in vectors]
            if len(vectors) != 1 or len(rest) != 1 or not isinstance(rest[0], fx.Node):
                return None
            biases.append(vectors[0])
            chain.append(rest[0])
        elif is_call(here, SHAPE_ONLY) and isinstance(here.args[0], fx.Node):
            chain.append(here.args[0])
        else:
            break
    if not is_call(chain[-1], WAIT) or any(len(node.users) != 1 for node in chain):
        return None
    all_reduce = chain[-1].args[0]
    if not is_call(all_reduce, ALL_REDUCE | REDUCE_SCATTER) or not isinstance(all_reduce, fx.Node):
        return None
    if len(all_reduce.users) != 1 or all_reduce.args[1:] != walk.collectives[0].args[1:]:
        return None
    return _Partner((all_reduce, *reversed(chain)), tuple(biases))


def _pass_post_norm(walk: _Walk, norm: Norm) -> bool:
    """Step over `norm` and the residual addition after it, if only they read the value (post-norm families)."""
    if walk.post is not None or walk.residuals or not set(walk.value.users) <= set(norm.nodes):
        return False
    if len(norm.output.users) != 1:
        return False
    reader = next(iter(norm.output.users))
    normalized = tensor_of(norm.output)
    if not is_call(reader, ADD) or reader.kwargs or normalized is None:
        return False
    others = [argument for argument in reader.args[:2] if argument is not norm.output]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return False
    value = tensor_of(others[0])
    if (
        value is None
        or value.shape != normalized.shape
        or value.dtype != normalized.dtype
        or _dtype(reader) != value.dtype
    ):
        return False
    if any(user not in norm.nodes for node in norm.nodes[:-1] for user in node.users):
        return False
    walk.post, walk.residuals = norm, [others[0]]
    walk.passed.update(norm.nodes)
    walk.step_to(reader)
    return True


def _ended(walk: _Walk, norm: Norm | None, without_norm: Rejection | None = None) -> Reduced:
    return Reduced(
        collectives=tuple(walk.collectives),
        biases=tuple(walk.biases),
        scale=walk.scale,
        scales=tuple(walk.scales),
        scale_tensor=walk.scale_tensor,
        post=walk.post,
        residuals=tuple(walk.residuals),
        total=walk.value,
        norm=norm,
        passed=frozenset(walk.passed),
        without_norm=without_norm,
    )


def product_of(partial: fx.Node) -> fx.Node | None:
    """The GEMM that makes `partial`, if nothing else reads it."""
    source = skip_shapes(partial)
    node = partial
    while node is not source:
        if len(node.users) != 1:
            return None
        node = node.args[0]  # type: ignore[assignment]
    is_product = is_call(source, frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default}))
    # alpha and beta of addmm have no place in the fused op: such a GEMM stays, and its result is copied.
    return source if is_product and len(source.users) == 1 and not source.kwargs else None
