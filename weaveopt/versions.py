"""Supported and tested versions: the one table that metadata, documentation, `doctor` and CI are held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Supported:
    """Versions of one package. `tested`: releases (`2.13`) that tests ran with, ascending."""

    name: str
    least: str
    tested: tuple[str, ...]


PYTHON = Supported("python", "3.11", ("3.11", "3.13", "3.14"))
TORCH = Supported("torch", "2.11", ("2.11", "2.13", "2.14", "2.15"))
TRANSFORMERS = Supported("transformers", "5.23", ("5.23", "5.24"))
ACCELERATE = Supported("accelerate", "1.10", ("1.10", "1.15"))

SUPPORTED = (PYTHON, TORCH, TRANSFORMERS, ACCELERATE)
"""One row a package, as `docs/versions.md` shows them."""


def release(version: str) -> str:
    """Major and minor number of a version: `2.13` of `2.13.0+cu130`."""
    from packaging.version import Version

    return ".".join(map(str, (*Version(version).release, 0)[:2]))


def at_least(found: str, minimum: str) -> bool:
    """True if a version such as `2.13.0+cu130` is `minimum` or later; a pre-release counts as its release."""
    from packaging.version import Version

    return Version(found).release >= Version(minimum).release


def untested(package: Supported, found: str) -> str | None:
    """Why `found` counts as untested: newer than every tested release, or between two of them; None if tested."""
    if release(found) in package.tested:
        return None
    newest = package.tested[-1]
    how = "newer than any that was tested" if at_least(found, newest) else "never tested"
    return f"{how} (tests ran with {', '.join(package.tested)})"
