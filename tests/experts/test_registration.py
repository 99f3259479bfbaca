"""`ep_implementation="weave"`: there in whatever order things are imported, at no cost until it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from weaveopt.errors import WeaveError
from weaveopt.integrations.transformers.expert_form import activation_of
from weaveopt.ops.experts.activation import Activation


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_weaveopt_imports_neither_transformers_nor_torch() -> None:
    code = "import weaveopt, sys; print([name for name in ('transformers', 'torch') if name in sys.modules])"
    assert python(code) == "[]"


IMPORTS = (
    "import weaveopt, transformers",
    "import transformers, weaveopt",
    "import transformers.distributed.expert_parallel, weaveopt",
    "import weaveopt, transformers.distributed.expert_parallel",
    "import weaveopt; from transformers import AutoModelForCausalLM",
    "import transformers; from transformers import AutoModelForCausalLM; import weaveopt",
)
OTHERS = ("torch._inductor.compile_fx", "torch.onnx", "torch.distributed.fsdp", "triton", "huggingface_hub")
LOOK = """
from transformers.distributed import expert_parallel as module
import inspect, sys
interface = module.EPImplementationInterface()
print(interface["weave"].__name__, "all_to_all" in interface, "AllToAllEP" in inspect.getsource(module))
print([type(finder).__module__ for finder in sys.meta_path if "weaveopt" in type(finder).__module__])
print("weaveopt" in type(module.__spec__.loader).__module__, "weaveopt" in type(module.__loader__).__module__)
"""


def test_is_registered_in_any_order() -> None:
    """Each order in a process of its own, forked where nothing of transformers and weaveopt is loaded yet, but what
    they import of others."""
    code = f"""
import os, sys, {", ".join(OTHERS)}
assert not any(name in sys.modules for name in ("transformers", "weaveopt"))
for imports in {IMPORTS!r}:
    if os.fork() == 0:
        exec(imports + {LOOK!r})
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
    assert python(code).splitlines() == ["ExpertExchange True True", "[]", "False False"] * len(IMPORTS)


def test_other_versions_of_transformers_import_with_a_warning() -> None:
    code = """
import sys, types, warnings
package, nested = types.ModuleType("transformers"), types.ModuleType("transformers.distributed")
package.__path__ = nested.__path__ = []
sys.modules["transformers"], sys.modules["transformers.distributed"] = package, nested
sys.modules["transformers.distributed.expert_parallel"] = types.ModuleType("transformers.distributed.expert_parallel")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import weaveopt
print(len(caught), 'no ep_implementation="weave" with this transformers' in str(caught[0].message))"""
    assert python(code) == "1 True"


def mixtral(**settings: object) -> MixtralExperts:
    config = CONFIG_MAPPING["mixtral"](hidden_size=8, intermediate_size=4, num_local_experts=2, **settings)
    return MixtralExperts(config)


def test_activations_are_found_by_what_modules_make_of_numbers() -> None:
    assert activation_of(mixtral()) == Activation("silu", gated=True)
    assert activation_of(mixtral(hidden_act="gelu_pytorch_tanh")) == Activation("gelu_tanh", gated=True)
    config = CONFIG_MAPPING["gpt_oss"](hidden_size=8, intermediate_size=4, num_local_experts=2)
    found = activation_of(GptOssExperts(config))
    assert found == Activation("clamped_swish", gated=True, interleaved=True, alpha=1.702, limit=7.0)
    with torch.device("meta"):
        assert activation_of(mixtral()) == Activation("silu", gated=True)


class HasPlainForm(nn.Module):
    """Not gated: a single projection."""

    has_gate, has_bias, is_transposed, has_post_expert_norm = False, False, False, False

    def __init__(self, act_fn: nn.Module) -> None:
        super().__init__()
        self.act_fn = act_fn


class HasLimit(HasPlainForm):
    """SiLU of a gate that is cut from above, times an up that is cut on both sides."""

    has_gate, swiglu_limit = True, 3.0

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.swiglu_limit)) * up.clamp(-self.swiglu_limit, self.swiglu_limit)


def test_limits_are_found() -> None:
    assert activation_of(HasLimit(nn.SiLU())) == Activation("silu", gated=True, limit=3.0)


def test_unknown_experts_are_refused_with_what_to_use() -> None:
    assert activation_of(HasPlainForm(nn.ReLU())) == Activation("relu", gated=False)
    assert activation_of(HasPlainForm(ACT2FN["relu2"])) == Activation("relu_squared", gated=False)
    normalized = mixtral()
    normalized.has_post_expert_norm = True
    for experts, why in (
        (nn.Linear(2, 2), "has no has_gate"),
        (normalized, "normalizes"),
        (HasPlainForm(nn.Tanh()), "has an activation that"),
        (mixtral(hidden_act="mish"), "has an activation that"),
    ):
        with pytest.raises(WeaveError, match=f'{why}.*use ep_implementation="all_to_all"'):
            activation_of(experts)
