"""Registration of `ep_implementation="weave"` with transformers, now or when it imports its registry, however late."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME, INDEPENDENT = "weave", "weave_independent"
MODULE = "transformers.distributed.expert_parallel"
"""Module that contains the registry in transformers 5.23 and later."""


def register() -> None:
    """Registers the implementations. Imports transformers; raises `ImportError` where that has no registry."""
    from transformers.distributed.expert_parallel import EPImplementationInterface

    from weaveopt.integrations.transformers.expert_exchange import ExpertExchange, IndependentExperts

    EPImplementationInterface.register(NAME, ExpertExchange)
    EPImplementationInterface.register(INDEPENDENT, IndependentExperts)


def register_when_imported() -> None:
    """Register now if transformers has its registry already, else right after that module is imported."""
    if MODULE in sys.modules:
        _register_or_warn()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register_or_warn() -> None:
    try:
        register()
    except (ImportError, AttributeError) as error:  # another version: importing it must not fail for our sake
        warnings.warn(f'weaveopt: no ep_implementation="weave" with this transformers: {error}', stacklevel=2)


class _Finder(MetaPathFinder):
    """Finds that one module, once, and has its loader call back."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """`loader`, and then the registration; leaves no trace in the module."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register_or_warn()
