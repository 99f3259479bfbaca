"""`weave::merged_linear`, and weights that become adjacent: identity, values, memory, and what keeps them in place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.graphs.projected import Projected, weights
from weaveopt.errors import WeaveError
from weaveopt.ops.merged_gemm.adjacent import adjoin, joined, num_apart


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
