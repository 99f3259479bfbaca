"""GEMMs of one input as one: which are, what it costs, and that results, weights and strides stay as they are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, LlamaConfig

import weaveopt
from tests.graphs.preview import previewed
from weaveopt.backend import weave
from weaveopt.errors import WeaveError
from weaveopt.inductor import prepared_inputs
from weaveopt.ops.merged_gemm.adjacent import adjoin, joined, num_apart
from weaveopt.records.report import Decision, GraphReport
from weaveopt.rewrites import RULES
from weaveopt.rewrites.merged_gemm import RULE
from weaveopt.sites.projections.matcher import KIND, ProjectionMatcher

ON_CPU = replace(RULES, matchers=(ProjectionMatcher(("cpu",)),))
"""The rule, and no other, where its kernels are the CPU's."""
WIDTHS = (32, 8, 8)


class Projected(nn.Module):
    """Queries, keys and values of a block, and what becomes of them."""

    def __init__(self, bias: bool = False, widths: tuple[int, ...] = WIDTHS, hidden: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, width, bias=bias) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        q, *others = (layer(x) for layer in self.layers)
        return q.sin() + torch.cat([each.cos() for each in others], dim=-1).repeat(1, 1, 2)


def compiled(model: Callable[..., object], strict: bool = True) -> Callable[..., object]:
    torch._dynamo.reset()
    options = {"force": [RULE], "strict": strict}
    return torch.compile(model, backend=partial(weave, options=options, rules=ON_CPU))  # type: ignore[return-value]


def weights(model: Projected) -> list[Tensor]:
    return [layer.weight for layer in model.layers]  # type: ignore[misc]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


# the operation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [(8,), (5, 3), (1, 7, 2, 4)])
def test_the_operation_is_the_layers(widths: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    model = Projected(bias, widths).to(dtype)
    biases = [layer.bias for layer in model.layers] if bias else []
    for rows in (0, 1, 7):
        x = torch.randn(rows, 16, dtype=dtype)
        expected = torch.cat([layer(x) for layer in model.layers], dim=1)
        before = torch.ops.weave.merged_linear(x, weights(model), biases)
        assert not adjoin(weights(model)) and not (bias and adjoin(biases))
        after = torch.ops.weave.merged_linear(x, weights(model), biases)
        for found in (before, after):
            torch.testing.assert_close(found, expected)
            assert found.is_contiguous()
        torch.library.opcheck(torch.ops.weave.merged_linear.default, (x, weights(model), biases))


@pytest.mark.parametrize(
    ("x", "columns", "biases"),
    [((3, 16), [], []), ((3, 15), [(8, 16)], []), ((16,), [(8, 16)], []), ((3, 16), [(8, 16)], [(7,)]),
     ((3, 16), [(8, 16), (8, 16)], [(8,)])],
)  # fmt: skip
def test_shapes_that_contradict(x: tuple[int, ...], columns: list[tuple[int, int]], biases: list[tuple[int]]) -> None:
    with pytest.raises(WeaveError, match="merged_linear: "):
        torch.ops.weave.merged_linear(torch.zeros(x), [*map(torch.zeros, columns)], [*map(torch.zeros, biases)])


# weights one after the other


def test_weights_keep_identity_values_and_updates() -> None:
    model = Projected(True)
    before, identities = copy.deepcopy(model), [id(each) for each in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    assert joined(weights(model)) is None
    assert adjoin(weights(model)) == ""
    whole = joined(weights(model))
    assert whole is not None and torch.equal(whole, torch.cat(weights(before)))
    assert [id(each) for each in model.parameters()] == identities
    assert all(each.is_leaf and each.requires_grad for each in model.parameters())
    with torch.enable_grad():
        model(torch.randn(1, 2, 16)).sum().backward()
    optimizer.step()
    assert not torch.equal(whole, torch.cat(weights(before))), "the step did not reach the joined weights"
    assert torch.equal(whole, torch.cat(weights(model)))
    state = model.state_dict()
    model.load_state_dict(before.state_dict())
    assert torch.equal(whole, torch.cat(weights(before))) and state["layers.0.weight"].shape == (32, 16)


def test_weights_that_stay_where_they_are() -> None:
    def refused(change: Callable[[Projected], object]) -> str:
        model = Projected()
        kept = change(model)
        places = [each.data_ptr() for each in weights(model)]
        why = adjoin(weights(model))
        assert [each.data_ptr() for each in weights(model)] == places and joined(weights(model)) is None
        del kept
        return why

    def inside_another(model: Projected) -> None:
        model.layers[1].weight.data = torch.randn(12, 16)[2:10]

    def transposed(model: Projected) -> None:
        model.layers[2].weight.data = torch.randn(16, 8).t()

    def made_in_inference(model: Projected) -> None:
        with torch.inference_mode():
            model.layers[0].weight = nn.Parameter(torch.randn(32, 16), requires_grad=False)

    assert "share" in refused(lambda model: model.state_dict())
    assert "share" in refused(lambda model: model.layers[2].weight.detach())
    assert "parts of other" in refused(inside_another)
    assert "parts of other" in refused(transposed)
    assert "inference mode" in refused(made_in_inference)


def test_weights_next_to_each_other_by_chance_are_not_joined() -> None:
    """Memory of two storages is no tensor."""
    memory = torch.randn(40, 16)
    parts = [memory[:32], memory[32:]]
    assert joined(parts) is None
    apart = [torch.from_dlpack(each.numpy()) for each in parts]
    assert apart[1].data_ptr() == apart[0].data_ptr() + apart[0].nbytes and joined(apart) is None


def test_some_of_the_weights_and_other_partners() -> None:
    """Graphs of one model may merge other sets: neighbors are adjacent too, and nothing is moved to and fro."""
    model, other = Projected(), nn.Linear(16, 8, bias=False)
    q, k, v = weights(model)
    assert adjoin([q, k, v]) == ""
    for few in ([q, k], [k, v]):
        found = joined(few)
        assert found is not None and torch.equal(found, torch.cat(few)) and adjoin(few) == ""
    places = [each.data_ptr() for each in (q, k, v)]
    for few in ([q, v], [k, q], [q, other.weight], [v, other.weight]):
        assert joined(few) is None and "adjacent to others" in adjoin(few)
    assert [each.data_ptr() for each in (q, k, v)] == places


def test_memory_is_free_once_no_weight_lives() -> None:
    model = Projected()
    adjoin(weights(model))
    whole = joined(weights(model))
    assert whole is not None
    memory = StorageWeakRef(whole.untyped_storage())
    last = model.layers[2].weight
    del whole, model
    assert not memory.expired() and torch.isfinite(last).all()
    del last
    assert memory.expired()


def test_checkpoints_hold_every_weight(tmp_path: Path) -> None:
    """Libraries that save take tensors of one storage for one tensor, and drop all but the first."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    before = copy.deepcopy(model.state_dict())
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert not adjoin([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        assert not adjoin([mlp.gate_proj.weight, mlp.up_proj.weight])
    num_bytes = sum(each.nbytes for each in model.parameters())
    Accelerator(cpu=True).save_model(model, str(tmp_path / "accelerate"))
    model.save_pretrained(tmp_path / "transformers")
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 1.2 * num_bytes
    files = ("accelerate/model.safetensors", "transformers/model.safetensors", "model.safetensors")
    found = [*(safetensors.torch.load_file(tmp_path / each) for each in files), torch.load(tmp_path / "state.pt")]
    for state in found:
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], each) for name, each in before.items())
    restored = pickle.loads(pickle.dumps(model)).state_dict()
    assert all(torch.equal(restored[name], each) for name, each in before.items())


def test_no_memory_to_move_in(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Projected()

    def full(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "empty", lambda *sizes, **named: full() if named else torch.zeros(*sizes))
    assert "no memory" in adjoin(weights(model))
    monkeypatch.undo()
    assert adjoin(weights(model)) == "" and joined(weights(model)) is not None


def test_calls_that_find_weights_apart_are_counted() -> None:
    model, x = Projected(), torch.randn(2, 16)
    before = num_apart()
    torch.ops.weave.merged_linear(x, weights(model), [])
    assert num_apart() == before + 1
    kept = model.state_dict()
    adjoin(weights(model))
    torch.ops.weave.merged_linear(x, weights(model), [])
    assert num_apart() == before + 1, "weights that cannot be moved count each time"
    del kept


# sites and prices


def decisions(report: GraphReport) -> list[Decision]:
    return [each for each in report.decisions if each.site.kind == KIND]


def gpu_report(fn: Callable[..., object], *inputs: Tensor, disable: tuple[str, ...] = ()) -> GraphReport:
    return previewed(fn, inputs, machine="h200x4", device="cuda", static=True, force=(), disable=disable)


def projections(*sizes: int, rows: int = 8, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    return (torch.empty(1, rows, 4096, dtype=dtype), *(torch.empty(size, 4096, dtype=dtype) for size in sizes))


def three(x: Tensor, *each: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight).sin() for weight in each)


def test_few_rows_are_one_gemm_and_many_are_left_where_it_loses() -> None:
    [few] = decisions(gpu_report(three, *projections(2048, 512, 512)))
    assert few.chosen.choice == RULE and few.chosen.estimate is not None
    assert few.chosen.estimate.us < 0.7 * few.baseline.us
    assert few.site.description == "3 x (x @ w^T)" and few.site.groups == ()
    assert dict(few.site.facts)["columns"] == "2048 + 512 + 512"
    [many] = decisions(gpu_report(three, *projections(14336, 14336, rows=16384)))
    assert many.chosen.choice == "leave"
    [off] = decisions(gpu_report(three, *projections(2048, 512, 512), disable=(RULE,)))
    assert off.chosen.choice == "leave" and off.alternatives[0].rejections[0].code == "disabled"


def test_results_that_are_returned_are_copied() -> None:
    def returned(x: Tensor, *each: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, weight) for weight in each)

    [decision] = decisions(gpu_report(returned, *projections(2048, 512, 512)))
    estimate = next(each for each in (decision.chosen, *decision.alternatives) if each.choice == RULE).estimate
    assert estimate is not None and [term.name for term in estimate.terms] == ["gemm", "copy"]


def test_places_that_look_alike() -> None:
    x, wide, narrow = projections(2048, 512)
    y, bias = torch.empty_like(x), torch.empty(512, dtype=torch.bfloat16)

    def sites(fn: Callable[..., object], *inputs: Tensor) -> int:
        return len(decisions(gpu_report(fn, *inputs)))

    assert sites(lambda x, y, a, b: (F.linear(x, a).sin(), F.linear(y, b).sin()), x, y, wide, narrow) == 0
    assert sites(lambda x, a: (F.linear(x, a).sin(), F.linear(x, a).cos()), x, wide) == 0
    assert sites(lambda x, a, b: (F.linear(x, a).sin(), F.linear(x, b * 2).sin()), x, wide, narrow) == 0
    assert sites(lambda x, a, b: (F.linear(x, a).sin(), (x @ b).sin()), x, wide, narrow.t().contiguous()) == 0
    assert sites(lambda x, a, b, c: (F.linear(x, a).sin(), F.linear(x, b, c).sin()), x, wide, narrow, bias) == 0
    biased = lambda x, b, c, d, e: (F.linear(x, b, c).sin(), F.linear(x, d, e).sin())  # noqa: E731
    assert sites(biased, x, narrow, bias, narrow.clone(), bias.clone()) == 1
    assert sites(lambda x, a, b: (F.linear(x, a).sin(), F.linear(x.view(8, 4096), b).sin()), x, wide, narrow) == 1


@pytest.mark.parametrize(("columns", "hidden", "bias", "fits"), [
    (509, 4096, False, True), (509, 4096, True, False), (512, 4095, False, True), (509, 4095, False, False),
])  # fmt: skip
def test_weights_begin_at_aligned_addresses(columns: int, hidden: int, bias: bool, fits: bool) -> None:
    """Inductor copies inputs that it does not find aligned, in every call."""
    x = torch.empty(8, hidden, dtype=torch.bfloat16)
    each = [torch.empty(n, hidden, dtype=torch.bfloat16) for n in (columns, 512)]
    biases = [torch.empty(n, dtype=torch.bfloat16) for n in (columns, 512)] if bias else [None, None]

    def run(x: Tensor, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor | None) -> tuple[Tensor, Tensor]:
        return F.linear(x, a, c).sin(), F.linear(x, b, d).sin()

    given = [x, *each, *(one for one in biases if one is not None)]
    fn = run if bias else lambda x, a, b: run(x, a, b, None, None)
    [decision] = decisions(gpu_report(fn, *given))
    codes = {reason.code for other in decision.alternatives for reason in other.rejections}
    assert ("not_aligned" in codes) is not fits, decision


def test_cpu_ranks_have_no_such_sites() -> None:
    x, *each = projections(64, 32)
    assert decisions(previewed(three, (x, *each), machine="cpu", static=True)) == []


@pytest.mark.parametrize("has_cuda", [False, True])
def test_training_leaves_weights_where_they_are(has_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each graph is watched for being captured."""
    monkeypatch.setattr(prepared_inputs, "runs_on_gpu", lambda _: has_cuda)
    monkeypatch.setattr(prepared_inputs, "_is_captured", lambda: False)
    model, plain = Projected(), Projected()
    plain.load_state_dict(model.state_dict())
    places = [each.data_ptr() for each in weights(model)]
    with torch.enable_grad():
        x = torch.randn(2, 3, 16)
        compiled(model)(x).sum().backward()  # type: ignore[attr-defined]
        plain(x).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert [each.data_ptr() for each in weights(model)] == places
    found = [each for graph in weaveopt.report(model).graphs for each in graph.decisions if each.site.kind == KIND]
    assert found and all(each.site.rejections[0].code == "training" for each in found)


# graphs that run


@pytest.mark.parametrize("bias", [False, True])
def test_compiled_layers_compute_the_same(bias: bool) -> None:
    model = Projected(bias)
    before, call = copy.deepcopy(model), compiled(model)
    for tokens in (3, 3, 5, 9):  # the second count makes sizes symbolic
        x = torch.randn(2, tokens, 16)
        torch.testing.assert_close(call(x), before(x))
    assert joined(weights(model)) is not None
    report = weaveopt.report(model)
    assert not report.fallbacks and all(each.decisions[0].chosen.choice == RULE for each in report.graphs)
    assert any("another order" in line for line in report.graphs[0].rounding)


def test_one_compiled_graph_for_several_layers() -> None:
    layers, x = [Projected(True) for _ in range(4)], torch.randn(2, 3, 16)
    calls = [torch.compile(each, backend=partial(weave, options={"force": [RULE]}, rules=ON_CPU)) for each in layers]
    for _ in range(2):
        for layer, call in zip(layers, calls, strict=True):
            torch.testing.assert_close(call(x), layer(x))
    assert all(joined(weights(each)) is not None for each in layers)


def test_weights_that_are_replaced_join_again() -> None:
    model, x = Projected(), torch.randn(2, 3, 16)
    call = compiled(model)
    call(x)
    for each in weights(model):
        each.data = torch.randn_like(each)
    for _ in range(2):
        torch.testing.assert_close(call(x), model(x))
    assert joined(weights(model)) is not None
    for each in weights(model):
        each.mul_(-3.0)
    torch.testing.assert_close(call(x), model(x))


def test_weights_that_are_others_in_every_call_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with parameters that are loaded for each call: to move them takes longer than it saves."""
    monkeypatch.setattr(prepared_inputs, "MOST_TIMES", 3)
    model, x = Projected(), torch.randn(2, 3, 16)
    call = compiled(model, strict=False)
    for times in range(6):
        for each in weights(model):
            each.data = torch.randn_like(each)
        torch.testing.assert_close(call(x), model(x))
        assert (joined(weights(model)) is not None) == (times < 3), times
    [fallback] = weaveopt.report(model).fallbacks
    assert fallback.error == "the inputs were others in 3 calls"


def test_what_a_cuda_graph_reads_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was captured replays with the addresses that it saw, whichever other graph would move them."""
    captures = [True]
    monkeypatch.setattr(prepared_inputs, "runs_on_gpu", lambda _: True)
    monkeypatch.setattr(prepared_inputs, "_is_captured", lambda: captures[0])
    model, x = Projected(), torch.randn(2, 3, 16)
    left = torch.compile(
        lambda x: model(x), backend=partial(weave, options={"disable": [RULE]}, rules=ON_CPU)
    )  # fmt: skip
    torch.testing.assert_close(left(x), model(x))
    captures[0] = False
    places = [each.data_ptr() for each in weights(model)]
    call = torch.compile(model, backend=partial(weave, options={"force": [RULE]}, rules=ON_CPU))
    for _ in range(2):
        torch.testing.assert_close(call(x), model(x))
    assert [each.data_ptr() for each in weights(model)] == places
    assert "a CUDA graph reads" in weaveopt.report(model).fallbacks[0].error
    another = Projected()
    torch.testing.assert_close(compiled(another)(x), another(x))
    assert joined(weights(another)) is not None


def test_what_fails_while_weights_are_moved_costs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Projected(), torch.randn(2, 3, 16)
    monkeypatch.setattr(torch._C, "_storage_Use_Count", None)
    torch.testing.assert_close(compiled(model, strict=False)(x), model(x))
    assert "TypeError" in weaveopt.report(model).fallbacks[0].error


def test_weights_that_cannot_be_moved_are_reported_once() -> None:
    model, x = Projected(), torch.randn(2, 3, 16)
    kept, call = model.state_dict(), compiled(model, strict=False)
    for _ in range(3):
        torch.testing.assert_close(call(x), model(x))
    kept["layers.1.weight"].mul_(5.0)
    torch.testing.assert_close(call(x), model(x))
    [fallback] = weaveopt.report(model).fallbacks
    assert (fallback.step, fallback.error) == ("first call", "other tensors share the weights' memory")


def test_what_is_returned_has_the_strides_that_it_had() -> None:
    model = Projected()

    def call(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (layer(x) for layer in model.layers)
        return q, k.view(2, 3, 2, 4).transpose(1, 2), v.sin(), x + k.sum()

    x = torch.randn(2, 3, 16)
    for found, wanted in zip(compiled(call)(x), call(x), strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride() and found.is_contiguous() == wanted.is_contiguous()
    assert joined(weights(model)) is not None


def test_attention_reads_slices() -> None:
    """Heads of 4 with grouped keys; views that cannot be made of a slice are copied."""
    model = Projected(True)

    def call(x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(2, 3, -1, 4).transpose(1, 2) for layer in model.layers)
        rows = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return rows.transpose(1, 2).flatten() + model.layers[1](x).view(-1).sum()

    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(compiled(call)(x), call(x))
    assert joined(weights(model)) is not None


def test_inference_mode_and_no_grad_in_turns() -> None:
    model, x = Projected(), torch.randn(2, 3, 16)
    call = compiled(model)
    with torch.inference_mode():
        torch.testing.assert_close(call(x), model(x))
    assert not any(each.is_inference() for each in model.parameters())
    torch.testing.assert_close(call(x), model(x))
    with torch.enable_grad():
        model(x).sum().backward()
    assert all(each.grad is not None for each in model.parameters())
