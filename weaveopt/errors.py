"""Every error that weaveopt raises, in one file.

A message says what was asked, what was found and what to do. Something that merely may not be
rewritten is not an error: it is a `Rejection` (see `weaveopt.records.candidate`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weaveopt.records.candidate import Rejection


class WeaveError(RuntimeError):
    """Misuse, or a state in which continuing would give wrong data or a hang."""


class OptionError(WeaveError):
    """An option, environment variable or command-line value that weaveopt does not have or accept."""


class ProfileError(WeaveError):
    """A machine profile that cannot be used. Names file, field, what was found and what is expected."""


class CaptureError(WeaveError):
    """A model that cannot be captured without weights, peers or a GPU; says what is missing."""


class AgreementError(WeaveError):
    """Ranks of one group would run different plans, or one of them never came to agree."""


class ArenaError(WeaveError):
    """Symmetric memory could not be reserved or exchanged."""


class ExportError(WeaveError):
    """Weights could not be put where peers read them, or are not there any more."""


class OrderError(WeaveError):
    """The code that Inductor wrote for a graph begins and waits for communication in another order than was asked.

    Nothing of it ran, and nothing of it is cached. All ranks run the captured graph in its place.
    """

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


class MulticastError(WeaveError):
    """NVLink multicast is missing or was wrong where a plan relies on it: the group never uses it again."""


class PeerTimeoutError(WeaveError):
    """A wait for a peer ended without its signal; the result of the call must not be used.

    The message holds op, rank, peer, slot, expected and seen epoch.
    """


def closest(word: str, known: tuple[str, ...]) -> str:
    """`did you mean 'strict'?`, or the whole list when nothing is near."""
    import difflib

    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def calls_differ(where: str, own: str, peer: int, other: str, expected: str) -> AgreementError:
    """The error of two ranks that are in different calls; `own` and `other` name the calls.

    Sites of two models, or of two graphs of one model, may have the same name.
    """
    if own == other:
        other = "a site of the same name and size, of another graph or in another form"
    return AgreementError(
        f"{where}: runs {own}, but rank {peer} runs {other} ({expected}): ranks of a group must make the same calls in "
        "the same order"
    )
