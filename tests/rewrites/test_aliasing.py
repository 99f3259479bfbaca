"""Normalized rows alias the arena only if all their readers have finished before the next site writes there."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

from tests.graphs import forms
from tests.graphs.calls import calls, sharded
from tests.graphs.preview import fake_group, previewed
from tests.graphs.reductions import RMS
from weaveopt.inductor import seams as inductor
from weaveopt.ops.reduction.call import NormSpec, ReductionCall
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Candidate, Fabric
from weaveopt.records.norm import NormKind
from weaveopt.records.site import Site
from weaveopt.rewrites import RULES
from weaveopt.rewrites.reduction.aliasing import aliasing_values
from weaveopt.rewrites.reduction.candidates import FusedReductionPlan
from weaveopt.rule import Chosen, FoundSite, HooksInductor, Proposal
from weaveopt.sites.reduction.matcher import KIND, Reduction
from weaveopt.sites.shared.epilogue import Reduced
from weaveopt.sites.shared.norms import Norm

aten = torch.ops.aten
BULK, MAIL = (
    KernelRow(64, Algorithm.TWO_SHOT, Transfer.BULK, 64),
    KernelRow(64, Algorithm.TWO_SHOT, Transfer.LL_PACKET),
)


HOOKS = [hook for rule in RULES.site_rules if isinstance(rule, HooksInductor) for hook in rule.inductor_hooks()]


class Chain:
    """A graph of sites: each reduces a value and gives normalized rows."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.weight = self.graph.placeholder("weight")
        self.chosen: list[Chosen] = []

    def call(self, target: Callable[..., object], *args: object, device: str = "meta", width: int = 64) -> fx.Node:
        node = self.graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = torch.empty(8, width, device=device)
        return node

    def site(
        self,
        partial: fx.Node,
        form: KernelRow = BULK,
        *,
        has_norm: bool = True,
        fabric: Fabric = Fabric.PEER,
        quantizes: bool = False,
        plan: object = None,
        takes: tuple[fx.Node, ...] = (),
    ) -> fx.Node:
        """The rows that a site gives. `plan`: what a rule other than this one remembers of it; `takes`: nodes in front
        of it that its replacement takes in."""
        reduced = self.call(aten.abs.default, partial)
        output = self.call(aten.neg.default, reduced)
        interior = frozenset([reduced, output, *takes])
        norm = Norm(reduced, RMS, None, None, output, (output,), 1e-6) if has_norm else None
        walked = Reduced((reduced,), (), 1.0, (), None, None, (), reduced, norm, frozenset([reduced]))
        site = Site(output.name, KIND, ("0",), "", (reduced.name,))
        found = FoundSite(site, interior, None, Reduction(walked, interior))
        workload = Workload(64, 64, 64, "float32", 2)
        lowered = plan or FusedReductionPlan(workload, fabric, "0", (), form.algorithm, (form,), quantizes=quantizes)
        self.chosen.append(Chosen(found, Proposal(Candidate("rule", fabric), interior, lowered)))
        return output

    def mm(self, value: fx.Node) -> fx.Node:
        return self.call(aten.mm.default, value, self.weight)

    def aliasing(self, *outputs: fx.Node) -> set[str]:
        self.graph.output(outputs)
        self.graph.lint()
        return {node.name for node in aliasing_values(self.chosen)}


def test_rows_that_products_read_before_the_next_site_alias() -> None:
    chain = Chain()
    first = chain.site(chain.mm(chain.x))
    gate, up = chain.mm(first), chain.mm(chain.call(aten.view.default, first, [4, 8]))
    second = chain.site(chain.mm(chain.call(aten.mul.Tensor, gate, up)))
    third = chain.site(chain.mm(second))
    head = chain.mm(third)
    assert chain.aliasing(head) == {first.name, second.name, third.name}


@pytest.mark.parametrize("taken", [False, True])
def test_a_product_that_a_later_site_takes_in_keeps_them_out(taken: bool) -> None:
    """A later site that takes in the GEMM may write rows while that GEMM still reads these."""
    chain = Chain()
    first = chain.site(chain.mm(chain.x))
    product = chain.mm(first)
    chain.site(product, plan="another rule's", takes=(product,) if taken else ())
    assert chain.aliasing(product) == (set() if taken else {first.name})


def test_a_reader_that_may_run_behind_the_next_site_keeps_them_out() -> None:
    chain = Chain()
    first = chain.site(chain.mm(chain.x))
    aside = chain.mm(first)  # nothing that the second site needs
    second = chain.site(chain.mm(first))
    assert chain.aliasing(aside, chain.mm(second)) == {second.name}


def test_a_reader_has_to_be_through_before_every_later_site() -> None:
    """Two sites that do not wait for each other: the reader of the first may run after the second."""
    chain = Chain()
    first = chain.site(chain.mm(chain.x))
    beside = chain.site(chain.mm(chain.call(aten.neg.default, chain.x)))
    assert chain.aliasing(chain.mm(first), chain.mm(beside)) == set()


def test_what_any_site_writes_counts() -> None:
    """A site whose own rows do not alias the arena passes its rows through it all the same; so may another rule's."""
    chain = Chain()
    first = chain.site(chain.mm(chain.x))
    aside = chain.mm(first)
    last = chain.site(chain.mm(first), plan="another rule's")
    assert chain.aliasing(aside, chain.mm(last)) == set()


def add_bias(chain: Chain, value: fx.Node) -> fx.Node:
    return chain.call(aten.addmm.default, value, chain.x, chain.weight)


def element_wise(chain: Chain, value: fx.Node) -> fx.Node:
    return chain.mm(chain.call(aten.relu.default, value))


def cast(chain: Chain, value: fx.Node) -> fx.Node:
    return chain.mm(chain.call(torch.ops.prims.convert_element_type.default, value, torch.bfloat16))


def handed_out(chain: Chain, value: fx.Node) -> fx.Node:
    return chain.call(aten.view.default, value, [4, 8])


@pytest.mark.parametrize("read", [add_bias, element_wise, cast, handed_out], ids=lambda read: read.__name__)
def test_only_products_may_read_them(read: Callable[[Chain, fx.Node], fx.Node]) -> None:
    chain = Chain()
    normed = chain.site(chain.mm(chain.x))
    assert chain.aliasing(read(chain, normed)) == set()


def test_a_product_with_a_bias_may_read_them() -> None:
    chain = Chain()
    normed = chain.site(chain.mm(chain.x))
    assert chain.aliasing(chain.call(aten.addmm.default, chain.x, normed, chain.weight)) == {normed.name}


def test_products_that_inductor_may_inline_into_a_later_kernel_do_not_count() -> None:
    """Batched ones of one row each, and rows of a few elements."""
    chain = Chain()
    normed = chain.site(chain.mm(chain.x))
    assert chain.aliasing(chain.call(aten.bmm.default, normed, chain.weight)) == set()
    chain = Chain()
    normed = chain.site(chain.mm(chain.x))
    assert chain.aliasing(chain.mm(chain.call(aten.view.default, normed, [-1, 2], width=2))) == set()


@pytest.mark.parametrize("what", [{"has_norm": False}, {"quantizes": True}], ids=["a sum", "e4m3"])
def test_only_normalized_rows_without_scales_alias(what: dict[str, bool]) -> None:
    chain = Chain()
    assert chain.aliasing(chain.mm(chain.site(chain.mm(chain.x), **what))) == set()  # type: ignore[arg-type]


def test_on_another_fabric_nothing_aliases() -> None:
    chain = Chain()
    normed = chain.site(chain.mm(chain.x), fabric=Fabric.MULTIMEM)
    assert chain.aliasing(chain.mm(normed)) == set()


@torch.library.custom_op("weave_test::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def unsafe(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("target", "device"),
    [(torch.ops.weave_test.unsafe.default, "meta"), (aten.sin.default, "cpu"), (torch.ops.higher_order.cond, "meta")],
)
def test_in_graphs_that_become_several_cuda_graphs_nothing_aliases(target: Callable[..., object], device: str) -> None:
    """Values passed from one CUDA graph to the next are in memory of their own."""
    chain = Chain()
    normed = chain.site(chain.mm(chain.x))
    between = chain.call(target, chain.mm(normed), device=device)
    assert chain.aliasing(between, chain.mm(normed)) == set()


@pytest.mark.parametrize(("dtype", "num_values", "splits"), [
    (torch.bool, 8, True), (torch.uint8, 8, True), (torch.bool, 1, False), (torch.int64, 8, False),
])  # fmt: skip
def test_a_write_at_a_mask_splits_a_graph_unless_it_fills(dtype: torch.dtype, num_values: int, splits: bool) -> None:
    """`x[mask] = y`: Inductor has the library do it, outside of CUDA graphs."""
    chain = Chain()
    normed = chain.site(chain.mm(chain.x))
    mask, values = chain.graph.placeholder("mask"), chain.graph.placeholder("values")
    mask.meta["val"] = torch.empty(4, device="meta", dtype=dtype)
    values.meta["val"] = torch.empty(num_values, device="meta", dtype=torch.bfloat16)
    last = chain.site(chain.mm(chain.call(aten.index_put.default, chain.mm(normed), [mask], values)))
    assert chain.aliasing(chain.mm(last)) == (set() if splits else {normed.name, last.name})


@pytest.mark.parametrize(("what", "splits"), [
    ("constant", False), ("lifted", False), ("made", False), ("input", True), ("computed", True), ("row", True),
    ("kept", True),
])  # fmt: skip
def test_a_number_of_another_device_splits_a_graph_unless_it_is_constant(what: str, splits: bool) -> None:
    """`x[mask] = 0.0` is traced with a number of the CPU."""
    chain = Chain()
    normed = chain.site(chain.mm(chain.x))
    mask = chain.graph.placeholder("mask")
    mask.meta["val"] = torch.empty(8, device="meta", dtype=torch.bool)
    constant, given = chain.graph.get_attr("_tensor_constant0"), chain.graph.placeholder("given")
    for node in (constant, given):
        node.meta["val"] = torch.empty(1 if what == "row" else ())

    def number(target: Callable[..., object], *args: object) -> fx.Node:
        node = chain.call(target, *args)
        node.meta["val"] = torch.empty(1 if what == "row" else ())
        return node

    value = {
        "constant": lambda: constant,
        "lifted": lambda: number(aten.lift_fresh_copy.default, constant),
        "made": lambda: number(aten.full.default, [], 0.0),
        "input": lambda: given,
        "computed": lambda: number(aten.lift_fresh_copy.default, given),
        "row": lambda: number(aten.lift_fresh_copy.default, constant),
        "kept": lambda: number(aten.lift_fresh_copy.default, constant),
    }[what]()
    last = chain.site(chain.mm(chain.call(aten.index_put.default, chain.mm(normed), [mask], value)))
    with inductor_config.patch(always_keep_tensor_constants=what == "kept"):
        found = chain.aliasing(chain.mm(last))
    assert found == (set() if splits else {normed.name, last.name})


@pytest.mark.parametrize("name", ["aten::sin", "aten::sin.default"])
def test_where_inductor_is_asked_to_split_at_an_operation_nothing_aliases(name: str) -> None:
    for asked, landed in (([name], False), (["aten::cos"], True)):
        chain = Chain()
        normed = chain.site(chain.mm(chain.x))
        with inductor_config.patch(custom_should_partition_ops=asked):
            found = chain.aliasing(chain.call(aten.sin.default, chain.mm(normed)), chain.mm(normed))
        assert found == ({normed.name} if landed else set())


def test_without_the_bulk_form_nothing_aliases() -> None:
    chain = Chain()
    assert chain.aliasing(chain.mm(chain.site(chain.mm(chain.x), form=MAIL))) == set()


def test_rows_that_products_read_alias_and_nothing_that_leaves_the_graph(graphs: list[fx.Graph]) -> None:
    hidden, inner, tokens = 8192, 16, 4096
    into, out_of = torch.zeros(2, inner, hidden).bfloat16(), torch.zeros(2, hidden, inner).bfloat16()
    norm = torch.ones(hidden).bfloat16()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = residual + forms.all_reduce(x @ into[0])
        total_2 = total + forms.all_reduce((forms.rms(total, norm) @ out_of[0]) @ into[1])
        last = forms.rms(total_2, norm)
        return last @ out_of[1], last, total_2

    inputs = torch.empty(tokens, inner).bfloat16(), torch.empty(tokens, hidden).bfloat16()
    report = previewed(block, inputs, world=4, machine="h200x4", device="cuda", static=True)
    assert [row.variant for row in report.decisions[0].chosen.table] == ["two_shot bulk"]
    assert [call.normalized_aliases_arena for call in calls(graphs[-1])] == [True, False]
    assert [out for _, out in sharded(graphs[-1])] == [True, False]
    told = [any("in the arena" in note for note in d.chosen.notes) for d in report.decisions]
    assert told == [True, False]


@pytest.mark.parametrize("lands", [True, False])
def test_inductor_puts_nothing_of_its_own_into_the_arena(lands: bool) -> None:
    """A later GEMM's result takes the memory of normalized rows that are read no more, unless it is the arena's."""

    def model(x: Tensor, residual: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
        op = torch.ops.weave.all_reduce_norm.default
        # Results of its own kernels, which it knows to be aligned.
        normed, total = op(x + 1, None, None, residual + 1, None, None, weight + 1, None, call)
        return ((normed @ matrix) @ matrix) @ matrix + total

    with fake_group(2):
        call = ReductionCall(
            site="s", group=dist.group.WORLD.group_name, fabric=Fabric.PEER, world=2, hidden=64, dtype="float32",
            out_dtype="float32", max_tokens=64, post=None, norm=NormSpec(NormKind.RMS, 1e-6), timeout_s=1.0,
            table=(BULK,), normalized_aliases_arena=lands,
        ).encode()  # fmt: skip
        arguments = (torch.ones(64, 64), torch.ones(64, 64), torch.ones(64), torch.ones(64, 64))
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(model, backend=through_seam, fullgraph=True)
            _, (code,) = run_and_get_code(compiled, *arguments)
    (results,) = re.findall(r"(\w+) = torch\.ops\.weave\.all_reduce_norm\.default\(", code)
    (normed,) = re.findall(rf"(\w+) = {results}\[0\]", code)
    assert bool(re.search(rf"= {normed}(;| ).*# reuse", code)) is not lands, code


def through_seam(graph_module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
    """Inductor as the backend calls it, without a rewrite."""
    return inductor.compile_with(
        lambda module, examples, **arguments: inductor.compile_graph(module, examples, arguments, HOOKS),
        graph_module,
        inputs,
    )
