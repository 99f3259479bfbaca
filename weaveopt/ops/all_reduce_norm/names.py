"""How profiles name the kernels of this family: `one_shot ll_packet`, `two_shot bulk ctas=16`."""

from __future__ import annotations

from functools import cache

from weaveopt.errors import ProfileError
from weaveopt.records.candidate import Algorithm, Lowering
from weaveopt.records.candidate import Form as Transfer

__all__ = [
    "ALGORITHMS",
    "LL_PACKET",
    "OP",
    "TRANSFERS",
    "Algorithm",
    "Lowering",
    "Transfer",
    "parse_variant",
    "variant_name",
]

OP = "all_reduce_norm"
"""The operation of these kernels' curves."""
LL_PACKET = Transfer.MAIL
_WORDS = {
    Transfer.SEGMENT: "segment",
    LL_PACKET: "ll_packet",
    Transfer.BULK: "bulk",
    Transfer.DIRECT: "direct",
}
TRANSFERS = {word: transfer for transfer, word in _WORDS.items()}
"""Transfers by their names in profiles."""
ALGORITHMS: dict[Transfer, tuple[Algorithm, ...]] = {
    Transfer.SEGMENT: (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT),
    LL_PACKET: (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT),
    Transfer.BULK: (Algorithm.TWO_SHOT,),
    Transfer.DIRECT: (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT),
}
"""Algorithms that there are kernels of, by transfer."""
_CTAS = " ctas="


def variant_name(algorithm: Algorithm, transfer: Transfer, num_ctas: int = 0) -> str:
    """The kernel's name in profiles; `num_ctas` 0: as many as are co-resident, which has no word."""
    return f"{algorithm.value} {_WORDS[transfer]}" + (f"{_CTAS}{num_ctas}" if num_ctas else "")


@cache
def parse_variant(name: str) -> tuple[Algorithm, Transfer, int]:
    """Algorithm, transfer and number of CTAs. Raises `ProfileError` where there is no such kernel."""
    known = {variant_name(each, transfer): (each, transfer) for transfer in ALGORITHMS for each in ALGORITHMS[transfer]}
    words, separator, num_ctas = name.partition(_CTAS)
    if words not in known or (separator and not num_ctas.isdigit()):
        expected = f"one of {', '.join(known)}, and perhaps{_CTAS}N behind it"
        raise ProfileError(f"a curve of {OP}: found variant {name!r}, expected {expected}")
    algorithm, transfer = known[words]
    return algorithm, transfer, int(num_ctas or 0)
