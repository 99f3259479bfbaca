"""Holds what ranks said against what they may say."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.case import NUM_STEPS, Case, Ended, Moment, Outcome, Said
from tests.faults.faults import FAULTS, Expected
from tests.faults.sayings import UNUSABLE, Saying


def complaints(case: Case, outcome: Outcome) -> list[str]:
    """Everything that is wrong with how `case` ended; nothing if all is as it must be."""
    expected = FAULTS[case.fault].expect(case)
    found = [f"left behind: {each}" for each in outcome.left]
    if outcome.injected_at is None and case.moment is not Moment.ANY:
        found.append("the fault never struck")
    for rank, ended in enumerate(outcome.ranks):
        if rank == case.victim and expected.victim is None:
            if ended.code not in expected.codes:
                found.append(f"rank {rank}, the victim, ended with {ended.code}, not {expected.codes}{_words(ended)}")
        else:
            allowed = expected.victim if rank == case.victim and expected.victim is not None else expected.others
            found += [f"rank {rank} {text}" for text in _wrong(case, rank, ended, allowed, expected, outcome)]
    return [*found, *_different_results(outcome)]


def _wrong(
    case: Case, rank: int, ended: Ended, allowed: frozenset[Saying], expected: Expected, outcome: Outcome
) -> Iterator[str]:
    said = ended.said
    if said is None:
        yield f"said nothing and ended with {ended.code}{_words(ended)}"
        return
    if not any(saying.matches(said.error, case, rank) for saying in allowed):
        names = ", ".join(sorted(saying.name for saying in allowed))
        yield f"said {said.error or 'that all is right'!r}, not one of {names}{_words(ended)}"
    code = 1 if said.error and not (case.catches and said.is_ours) else 0
    if ended.code != code:
        yield f"ended with {ended.code}, not {code}{_words(ended)}"
    if not said.error and len(said.steps) != NUM_STEPS:
        yield f"made {len(said.steps)} steps of {NUM_STEPS}"
    # A rank that was stopped has the time that it was stopped for besides.
    was_stopped = rank == case.victim and FAULTS[case.fault].stops_until_told
    if said.error and waited_s(said, outcome) > expected.limit_s(case) and not was_stopped:
        yield f"said {said.error!r} after {waited_s(said, outcome):.1f} s, not within {expected.limit_s(case):g} s"
    for again in said.later:
        if said.error.startswith("PeerTimeoutError") and not UNUSABLE.fullmatch(again):
            yield f"said {again!r} in a later call"
    if said.held:
        yield f"still had {', '.join(said.held)} open"


def waited_s(said: Said, outcome: Outcome) -> float:
    """From the fault, or the begin of the step that failed if that came later."""
    return said.ended_at - max(said.began_at, outcome.injected_at or 0.0)


def _different_results(outcome: Outcome) -> Iterator[str]:
    """Steps are right, and bitwise the same on all ranks of a group that made them."""
    of_step: dict[tuple[int, str], set[str]] = {}
    for rank, ended in enumerate(outcome.ranks):
        for step, words in enumerate(ended.said.steps if ended.said else ()):
            if "wrong" in words:
                yield f"rank {rank}: step {step} is not what the reference gives: {words}"
            for word in words.split():
                group, _, digest = word.partition(":")
                of_step.setdefault((step, group), set()).add(digest)
    for (step, group), digests in of_step.items():
        if len(digests) > 1 and group != "wrong":
            yield f"step {step} differs between ranks of group {group}: {sorted(digests)}"


def _words(ended: Ended) -> str:
    return f"; its last words:\n{ended.output[-1500:]}" if ended.output else ""
