"""Numbers with their nouns, and errors in one line, in every message and report."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str, several: str = "") -> str:
    """`0 ranks`, `1 rank`, `2 ranks`; `several` is the plural where it is not the noun with an s."""
    return f"{number} {noun if number == 1 else several or f'{noun}s'}"


def listed(noun: str, members: Sequence[object]) -> str:
    """`rank 1` of one member, `ranks 1, 2` of several."""
    return f"{noun if len(members) == 1 else f'{noun}s'} {', '.join(map(str, members))}"


def named(error: BaseException) -> str:
    """`KeyError: 'mul'`: the type and the first line of an error that has words."""
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next((line for line in lines if line), 'no message')}"
