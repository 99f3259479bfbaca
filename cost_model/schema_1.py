"""Profiles of schema 1, and what they are in schema 2: the same numbers under other names.

Schema 1 had a list of curves for each operation, and knew the kernels of one fused operation by fields of their own
(`algorithm`, `form`, `ctas`, `hidden`). In schema 2 every curve is named by its operation and variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from weaveopt.cost_model.validate import refuse

Document = dict[str, object]
SCHEMA = 1
BARE = frozenset({"all_gather", "all_reduce", "all_to_all", "reduce_scatter"})
"""Lists of curves of the library's collectives; the one other list is of a fused operation, under its name."""
TRANSFERS = {"segment": "segment", "mail": "ll_packet", "bulk": "bulk", "direct": "direct"}
"""What a `form` of schema 1 is called in schema 2."""
_OF_FABRIC = {"shm": "segment", "multimem": "direct", "nvshmem": "direct"}
"""The form of curves that do not tell any: profiles were written before there were several."""
_RENAMED = {"products": "gemms", "hidden": "row", "product": "gemm", "exchange": "communication"}


def upgraded(file: str, document: Mapping[str, object]) -> Document:
    """The document of schema 2 that means the same. Raises `ProfileError` for a kernel that never was."""
    made: Document = {}
    for name, value in document.items():
        if name == "schema":
            made[name] = SCHEMA + 1
        elif name == "fabrics":
            fabrics = cast(Mapping[str, Mapping[str, object]], value)
            made[name] = {fabric: _fabric(file, fabric, costs) for fabric, costs in fabrics.items()}
        elif name == "memory":
            made[name] = _with_rows(cast(Mapping[str, object], value), "norms")
        elif name == "contention":
            made[name] = _with_rows(cast(Mapping[str, object], value), "rows")
        else:
            made[_RENAMED.get(name, name)] = value
    return made


def _with_rows(block: Mapping[str, object], rows: str) -> Document:
    """The block with the fields of the objects in its list `rows` renamed."""
    made = dict(block)
    if rows in made:
        found = cast(Sequence[Mapping[str, object]], made[rows])
        made[rows] = [{_RENAMED.get(name, name): value for name, value in row.items()} for row in found]
    return made


def _fabric(file: str, fabric: str, costs: Mapping[str, object]) -> Document:
    made: Document = {"link": costs["link"]}
    ops = sorted(name for name in costs if name not in ("link", "forms"))
    curves = [curve for op in ops for curve in _curves(file, fabric, op, costs)]
    if curves:
        made["curves"] = curves
    if "forms" in costs:
        made["transfers"] = [TRANSFERS[form] for form in cast(Sequence[str], costs["forms"])]
    return made


def _curves(file: str, fabric: str, op: str, costs: Mapping[str, object]) -> Iterator[Document]:
    for index, curve in enumerate(cast(Sequence[Mapping[str, object]], costs[op])):
        algorithm = str(curve["algorithm"])
        if op in BARE:
            yield {"origin": curve["origin"], "op": op, "variant": algorithm, **_rest(curve)}
            continue
        form = _form(fabric, algorithm, curve)
        if form == "bulk" and algorithm != "two_shot":
            where = f"fabrics.{fabric}.{op}[{index}].algorithm"
            refuse(file, where, algorithm, "two_shot: bulk copies have no other")
        ctas = cast(int, curve.get("ctas", 0))
        variant = f"{algorithm} {TRANSFERS[form]}" + (f" ctas={ctas}" if ctas else "")
        made: Document = {"origin": curve["origin"], "op": op, "variant": variant, **_rest(curve)}
        if "hidden" in curve:
            made["row"] = curve["hidden"]
        if form == "mail":
            points = cast(Sequence[Mapping[str, int]], curve["points"])
            # Mailboxes ended where they were no longer worth their memory. On fewer CTAs than fit, LL packets were
            # measured where they may pay. Nothing is known beyond either end.
            made["last_bytes"] = points[-1]["bytes"]
            if ctas:
                made["first_bytes"] = points[0]["bytes"]
        yield made


def _rest(curve: Mapping[str, object]) -> Document:
    return {"world": curve["world"], "points": curve["points"]}


def _form(fabric: str, algorithm: str, curve: Mapping[str, object]) -> str:
    form = str(curve.get("form", "segment"))
    if form != "segment":
        return form
    if fabric == "peer":
        return "mail" if algorithm == "one_shot" else "bulk"
    return _OF_FABRIC.get(fabric, form)
