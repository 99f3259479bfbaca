"""Shipped model configurations: `config.json` files of public models, and nothing else (no weights, no code)."""

from __future__ import annotations

from importlib import resources


def names() -> tuple[str, ...]:
    """Names that `weaveopt explain` accepts without a file or a network."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def text(name: str) -> str:
    """The JSON text of one preset. `name` must be one of `names()`."""
    return resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
