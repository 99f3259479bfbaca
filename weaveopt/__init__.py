"""weaveopt: `torch.compile(model, backend="weave")` for tensor- and expert-parallel models.

model = torch.compile(model, backend="weave")
print(weaveopt.report(model))
model.generate(..., custom_generate=weaveopt.generate)    # a decode loop without Python between its steps
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from weaveopt.errors import WeaveError
from weaveopt.integrations.transformers.registration import register_when_imported
from weaveopt.versions import TRANSFORMERS

if TYPE_CHECKING:
    from weaveopt.generation.entry import generate as generate
    from weaveopt.integrations.transformers.continuous_batching import continuous_batching as continuous_batching
    from weaveopt.integrations.transformers.data_parallel import DataParallelExperts as DataParallelExperts
    from weaveopt.integrations.transformers.expert_exchange import share_experts as share_experts
    from weaveopt.integrations.transformers.key_heads import replicated_key_heads as replicated_key_heads
    from weaveopt.records.report import Report

try:
    __version__ = version("weaveopt")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"

register_when_imported()

__all__ = [
    "DataParallelExperts",
    "WeaveError",
    "__version__",
    "continuous_batching",
    "generate",
    "replicated_key_heads",
    "report",
    "share_experts",
]


def report(model: object | None = None) -> Report:
    """Report what was rewritten in `model`, what was not, and why; printed, it gives the tables of `weaveopt explain`.

    `model` is what `torch.compile` returned, or a module on which `.compile(backend="weave")` was called; None
    stands for everything that this process compiled.
    """
    from weaveopt.reporting import registry
    from weaveopt.reporting.printed_report import printed

    return printed(registry.report(model))


_LAZY = {
    "DataParallelExperts": "weaveopt.integrations.transformers.data_parallel",
    "continuous_batching": "weaveopt.integrations.transformers.continuous_batching",
    "generate": "weaveopt.generation.entry",
    "replicated_key_heads": "weaveopt.integrations.transformers.key_heads",
    "share_experts": "weaveopt.integrations.transformers.expert_exchange",
}
"""Imported on first use: they import transformers."""


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_LAZY[name]), name)
    except ImportError as error:
        needed = f"transformers {TRANSFORMERS.least} or newer"
        raise WeaveError(f"weaveopt.{name} needs {needed}: {error}") from error
